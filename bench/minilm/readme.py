"""Puts the measured table between two markers of Markdown files, so that nobody copies figures by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.minilm.report import ModelReport, model_table
from pyquant.errors import ArgumentError
from pyquant.report.render import write_text

BEGIN, END = "<!-- bench.minilm: begin -->", "<!-- bench.minilm: end -->"
PICTURE = Path("docs/minilm.png")


def update(pages: Sequence[Path], report: ModelReport, picture: Path | None) -> None:
    """Replace what stands between the markers of each page by the report's machine, command, table and picture.

    The picture is copied to PICTURE beside the first page; every page links to that copy. Raises ArgumentError, with no
    page changed, when one lacks the markers.
    """
    frames = [_around(page) for page in pages]
    shown = pages[0].parent / PICTURE
    if picture is not None:
        shown.parent.mkdir(exist_ok=True)
        shutil.copyfile(picture, shown)
    for page, (head, tail) in zip(pages, frames, strict=True):
        link = None if picture is None else Path(os.path.relpath(shown, page.parent))
        write_text(page, f"{head}{BEGIN}\n\n{_block(report, link)}\n\n{END}{tail}")


def between(page: Path) -> str:
    """What stands between the markers of a page. Raises ArgumentError when it lacks them."""
    head, tail = _around(page)
    text = page.read_text(encoding="utf-8")
    return text[len(head) + len(BEGIN) : len(text) - len(tail) - len(END)]


def _around(page: Path) -> tuple[str, str]:
    """What stands before the first marker and after the second."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ArgumentError("--readme", f"{page} without the lines {BEGIN} and {END}", "files that have both")
    return head, tail


def _block(report: ModelReport, picture: Path | None) -> str:
    parts = [f"{report.data[0].upper()}{report.data[1:]}. {report.environment.line()}.", model_table(report)]
    if picture is not None:
        parts.append(f"![size, fidelity and latency of every variant]({picture.as_posix()})")
    parts.append(
        f"Command: `{report.environment.command}`; one run, rounds interleaved. In brackets: fp32's time over it, the "
        "median over the rounds, which is not the quotient of the two medians shown. pyquant's variants hold the "
        "embeddings as int8 too (`embeddings=True`); torch.ao's holds them in fp32, which is most of its size."
    )
    return "\n\n".join(parts)
