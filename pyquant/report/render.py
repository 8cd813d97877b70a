"""What the pages of records are made of: Markdown tables, goals, the machine. Files are written whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pyquant.io.atomic import write_file
from pyquant.report.records.bench import Bar
from pyquant.report.records.environment import Environment


def page(parts: Iterable[str]) -> str:
    """Parts of a page with a blank line between them; those without a text are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def section(title: str, text: str) -> str:
    """A text under a heading; nothing where there is no text."""
    return f"## {title}\n\n{text}" if text else ""


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]], digits: int | None = None) -> str:
    """Comma-separated values with one header line. digits: of real numbers, None: all; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([f"{v:.{digits}g}" if digits and isinstance(v, float) else v for v in row])
    return out.getvalue()


def bars_section(bars: Sequence[Bar]) -> str:
    """Goals against measurements with PASS or FAIL; nothing where there are none."""
    if not bars:
        return ""
    text = table(
        ["bar", "goal", "measured", ""],
        [
            [b.name, f"{b.direction} {b.goal:g} {b.unit}".rstrip(), f"{b.measured:.4g}", "PASS" if b.passed else "FAIL"]
            for b in bars
        ],
    )
    return section("Bars", text)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, columns padded so that it also reads well in a terminal.

    Example:
        >>> print(table(["a", "b"], [[1, 22]]))
        | a | b  |
        |---|----|
        | 1 | 22 |
    """
    cells = [[str(c).replace("|", "\\|") for c in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def table_of_columns(columns: Mapping[str, Sequence[object]]) -> str:
    """The table of {heading: cells}."""
    return table(list(columns), zip(*columns.values(), strict=True))


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file in UTF-8, as pyquant.io.atomic.write_file does bytes. -> the path."""
    return write_file(path, text.encode("utf-8"))


def environment_lines(environment: Environment) -> str:
    """The machine and the command, as the head of a page."""
    return f"{environment.line()}\n\nCommand: `{environment.command}`"
