"""The documents match the code: public names have docstrings with examples that run, links point at files, every page
is on the landing page, and every figure has its command."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

import pyquant

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])


# Modules that are part of another package's machinery and import it: without it there is nothing to look at.
PARTS = {
    "transformers": ("conversions", "float_files", "on_the_fly", "quantizer", "switch"),
    "peft": ("layer", "switch"),
    "vllm": ("config", "embedding", "experts", "kernels", "layer", "report", "scheme", "tables"),
    "diffusers": ("config",),
}
BELONG_TO = {f"pyquant.integrations.{package}.{part}": package for package, parts in PARTS.items() for part in parts}


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(pyquant.__path__, "pyquant.")]
    return [name for name in found if name not in {"pyquant.__main__", "pyquant._native"}]


def is_importable(name: str) -> bool:
    return name not in BELONG_TO or importlib.util.find_spec(BELONG_TO[name]) is not None


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name: str) -> None:
    asking = {"pyquant.ops.plan", "pyquant.ops.layer_time", "pyquant.ops.linear", "pyquant.measure.tune"}
    if name in asking and importlib.util.find_spec("pyquant._native") is None:
        pytest.skip("its examples ask the compiled kernel table, and nothing is compiled here")
    if not is_importable(name):
        pytest.skip(f"{BELONG_TO[name]} is not installed")
    module: ModuleType = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


def test_some_examples_exist() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    here = [importlib.import_module(name) for name in modules() if is_importable(name)]
    assert sum(bool(example.examples) for module in here for example in finder.find(module)) >= 20


def test_public_names_are_documented() -> None:
    silent = [n for n in pyquant.__all__ if not n.startswith("__") and not inspect.getdoc(getattr(pyquant, n))]
    assert not silent


def names_on_no_page(names: Iterable[str], pages: Iterable[Path]) -> list[str]:
    """Names that no page has in its code, inline or in a block: a word of the prose is not the name."""
    code = [part for page in pages for part in re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)]
    known = {word for part in code for word in re.findall(r"\w+", part)}
    return [name for name in names if name not in known]


def test_every_public_name_stands_on_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A Plan is `left_(x)`:\n\n```python\nright = 1\n```\n")
    assert names_on_no_page(["left_", "right", "Plan", "left"], [page]) == ["Plan", "left"]
    names = [name for name in pyquant.__all__ if not name.startswith("__")]
    assert not names_on_no_page(names, [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_point_at_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_named_in_backticks_exist(path: Path) -> None:
    for name in re.findall(
        r"`((?:csrc|pyquant|tests|docs|bench|cmake|tools)/[\w./-]+\.(?:py|h|cpp|cu|cuh|md|cmake))`", path.read_text()
    ):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def pages_without_a_link(docs: Path) -> list[str]:
    """Pages of a folder, subfolders included, that its landing page does not link to."""
    linked = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (docs / "index.md").read_text()))
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    return sorted(pages - linked - {"index.md"})


def test_the_landing_page_links_to_every_page(tmp_path: Path) -> None:
    assert pages_without_a_link(ROOT / "docs") == []
    (tmp_path / "index.md").write_text("[a](a.md#part), b.md")
    for name in ("a.md", "b.md"):
        (tmp_path / name).touch()
    assert pages_without_a_link(tmp_path) == ["b.md"]
    readme = (ROOT / "README.md").read_text()
    assert all(f"](docs/{page}.md)" in readme for page in ("index", "quickstart", "figures"))


COMMAND = re.compile(r"`(?:make|pyquant bench|python -m bench[.\w]*|python examples/\w+\.py)\b[^`\n]*`")
MACHINE = re.compile(r"Xeon|EPYC|NVIDIA H200")


def figures_without_a_source(text: str) -> list[str]:
    """Sections that name no command, or no machine; rows of the last section's table that name no command."""
    *sections, table = text.split("\n## ")[1:]
    wrong = [s.splitlines()[0] for s in sections if not (COMMAND.search(s) and MACHINE.search(s))]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return wrong + [row for row in rows if not COMMAND.search(row)]


def test_no_figure_stands_without_command_and_machine() -> None:
    text = (ROOT / "docs" / "figures.md").read_text()
    assert figures_without_a_source(text) == []
    planted = "# t\n\n## a\n\n4x, Xeon\n\n## b\n\n4x, `make b`\n\n## c\n\n| f | c |\n| x | y |\n"
    assert figures_without_a_source(planted) == ["a", "b", "| x | y |"]
