"""Figures as Markdown; FORMATS is what the registry finds here."""

from __future__ import annotations

from typing import Final

from pyquant.report.records.figures import Cell, Figures
from pyquant.report.render import bars_table, environment_lines, table


def figures_markdown(figures: Figures) -> str:
    """The machine, goals, every table and the notes."""
    parts = [f"# {figures.title}", environment_lines(figures.environment)]
    if figures.bars:
        parts += ["## Bars", bars_table(figures.bars)]
    for shown in figures.tables:
        parts += [f"## {shown.title}", table(shown.header, [[_text(cell) for cell in row] for row in shown.rows])]
    if figures.notes:
        parts.append("\n".join(f"- {note}" for note in figures.notes))
    return "\n\n".join(parts) + "\n"


def _text(cell: Cell) -> str:
    if isinstance(cell, list):
        return ", ".join(map(_text, cell))
    return "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


FORMATS: Final = {"md": figures_markdown}
