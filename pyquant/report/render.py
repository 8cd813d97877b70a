"""What the pages of records are made of: Markdown tables, goals, the machine. Files are written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pyquant.io.atomic import write_file
from pyquant.report.records.bench import Bar
from pyquant.report.records.environment import Environment


def bars_table(bars: Sequence[Bar]) -> str:
    """Goals against measurements with PASS or FAIL."""
    return table(
        ["bar", "goal", "measured", ""],
        [
            [b.name, f"{b.direction} {b.goal:g} {b.unit}".rstrip(), f"{b.measured:.4g}", "PASS" if b.passed else "FAIL"]
            for b in bars
        ],
    )


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


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file in UTF-8, as pyquant.io.atomic.write_file does bytes. -> the path."""
    return write_file(path, text.encode("utf-8"))


def environment_lines(environment: Environment) -> str:
    """The machine and the command, as the head of a page."""
    return f"{environment.line()}\n\nCommand: `{environment.command}`"
