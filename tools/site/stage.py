"""Lays the pages of the site out in a folder, as they lie in the repository, with the navigation of docs/index.md."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import api

ROOT = Path(__file__).resolve().parents[2]
# Pages that docs/index.md does not list, under the heading that is last in the navigation.
PROJECT = ("README.md", "CHANGELOG.md", "SECURITY.md", "tools/ptxsim/README.md")
_PAGES = (".md", ".ipynb")
_NAMED_BY_FILE = re.compile(r"\[[\w./-]+\.(?:md|ipynb)\]\(([\w./-]+)\)")
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


def stage(to: Path) -> None:
    """Copy every page and what it shows or links to, and write the generated ones."""
    shutil.rmtree(to, ignore_errors=True)
    listed = [ROOT / page for pages in navigation().values() for page in (*pages, *PROJECT)]
    pages = list(dict.fromkeys([*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb"), *listed]))
    results = []
    for page in pages:  # grows: pages of results that a page links to
        _copy(page, to)
        for linked in _linked(page):
            if linked.suffix not in _PAGES and linked.is_file():
                _copy(linked, to)
            elif linked.suffix in _PAGES and linked not in pages:
                pages.append(linked)
                results.append(linked.relative_to(ROOT).as_posix())
    for result in results:
        _give_title(to / result)
    index = to / "docs" / "index.md"
    text = _NAMED_BY_FILE.sub(r"[](\1)", index.read_text(encoding="utf-8"))  # Sphinx puts the page's title there
    index.write_text(text + _toctrees(sorted(results)), encoding="utf-8")
    for name, text in api.pages().items():
        path = to / "api" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def navigation() -> dict[str, list[str]]:
    """{heading: pages from the repository's root} as the table of docs/index.md says them; a page stands once."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    heading = ""
    for line in (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        link = re.search(r"\]\(([^)#]+)", cells[1]) if len(cells) == 3 else None
        if link is None:
            continue
        words = cells[0].replace("**", "")
        heading = words[:1].upper() + words[1:] if words else heading
        page = (ROOT / "docs" / link[1]).resolve().relative_to(ROOT).as_posix()
        if page not in seen:
            seen.add(page)
            found.setdefault(heading, []).append(page)
    return found


def _toctrees(results: Sequence[str]) -> str:
    last = {"Reference": ["api/index.rst"], "Results": results, "Project": PROJECT}
    return "".join(_toctree(heading, pages) for heading, pages in {**navigation(), **last}.items() if pages)


def _toctree(heading: str, pages: Sequence[str]) -> str:
    names = "\n".join(f"/{page.rpartition('.')[0]}" for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{names}\n```\n"


def _give_title(page: Path) -> None:
    """Tables that a benchmark wrote begin without one."""
    text = page.read_text(encoding="utf-8")
    if not re.search(r"^# ", text, re.MULTILINE):
        folder = "" if page.parent.name == "results" else f"{page.parent.name}: "
        page.write_text(f"# {folder}{page.stem.replace('_', ' ')}\n\n{text}", encoding="utf-8")


def _linked(page: Path) -> Iterator[Path]:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for target in _LINK.findall(text):
        if "://" not in target:
            yield (page.parent / target).resolve()


def _copy(page: Path, to: Path) -> None:
    target = to / page.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(page, target)
