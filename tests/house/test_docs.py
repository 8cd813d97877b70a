"""The documents match the code: public names have docstrings with examples that run, links point at files."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import pyquant

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(pyquant.__path__, "pyquant.")]
    return [name for name in found if name not in {"pyquant.__main__", "pyquant._native"}]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name: str) -> None:
    asking = {"pyquant.ops.plan", "pyquant.ops.functional", "pyquant.measure.tune"}
    if name in asking and importlib.util.find_spec("pyquant._native") is None:
        pytest.skip("its examples ask the compiled kernel table, and nothing is compiled here")
    module: ModuleType = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


def test_some_examples_exist() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert sum(bool(t.examples) for n in modules() for t in finder.find(importlib.import_module(n))) >= 20


def test_public_names_are_documented() -> None:
    silent = [n for n in pyquant.__all__ if not n.startswith("__") and not inspect.getdoc(getattr(pyquant, n))]
    assert not silent


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
