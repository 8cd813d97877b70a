"""Figures as Markdown; FORMATS is what the registry finds here."""

from __future__ import annotations

from typing import Final

from pyquant.report.records.figures import Cell, Figures
from pyquant.report.render import bars_section, bullets, environment_lines, page, section, table


def figures_markdown(figures: Figures) -> str:
    """The machine, goals, every table and the notes."""
    tables = [
        section(shown.title, table(shown.header, [[_text(cell) for cell in row] for row in shown.rows]))
        for shown in figures.tables
    ]
    head = [f"# {figures.title}", environment_lines(figures.environment), bars_section(figures.bars)]
    return page([*head, *tables, bullets(figures.notes)])


def _text(cell: Cell) -> str:
    if isinstance(cell, list):
        return ", ".join(map(_text, cell))
    return "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


FORMATS: Final = {"md": figures_markdown}
