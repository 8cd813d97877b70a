"""Why the compiled library is not in use, in words that help."""

from __future__ import annotations

from pathlib import Path

from pyquant.ops.load import _why_missing


def test_a_source_tree_in_front_of_an_installation_is_named(tmp_path: Path) -> None:
    tree, site = tmp_path / "checkout", tmp_path / "site-packages"
    library = tree / "pyquant" / "lib" / "libpyquant_torch.so"
    (site / "pyquant" / "lib").mkdir(parents=True)
    assert "installed without its native build" in _why_missing(library, [str(site)])  # no source tree: no setup.py
    tree.mkdir()
    (tree / "setup.py").touch()
    assert f"source tree {tree}, which is not built: install it" in _why_missing(library, [str(tree), str(site)])
    (site / "pyquant" / "lib" / library.name).touch()
    said = _why_missing(library, ["", str(tree), str(site)])
    assert f"pyquant is installed in {site}, so run from another folder" in said
