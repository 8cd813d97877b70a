"""Puts the measured table between two markers of a Markdown file, so that nobody copies figures by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyquant.errors import ArgumentError
from pyquant.measure.records import ModelReport
from pyquant.report.render import model_table, write_text

BEGIN, END = "<!-- bench.minilm: begin -->", "<!-- bench.minilm: end -->"
PICTURE = Path("docs/minilm.png")


def update(path: Path, report: ModelReport, picture: Path | None) -> None:
    """Replace what stands between the markers by the report's machine, command, table and picture.

    Raises ArgumentError when the file lacks the markers.
    """
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ArgumentError("--readme", f"{path} without the lines {BEGIN} and {END}", "a file that has both")
    parts = [f"{report.data[0].upper()}{report.data[1:]}. {report.environment.line()}.", model_table(report)]
    if picture is not None:
        (path.parent / PICTURE).parent.mkdir(exist_ok=True)
        shutil.copyfile(picture, path.parent / PICTURE)
        parts.append(f"![size, fidelity and latency of every variant]({PICTURE.as_posix()})")
    parts.append(
        f"Command: `{report.environment.command}`; one run, rounds interleaved; in brackets: times fp32's speed."
    )
    write_text(path, head + BEGIN + "\n\n" + "\n\n".join(parts) + "\n\n" + END + tail)
