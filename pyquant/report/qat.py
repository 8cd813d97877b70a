"""A QatReport as Markdown and a picture; FORMATS is what the registry finds here."""

from __future__ import annotations

from typing import Final

from pyquant.report.plot import qat_png
from pyquant.report.records.bench import QatReport
from pyquant.report.render import bullets, environment_lines, page, section, table_of_columns


def qat_markdown(report: QatReport) -> str:
    """The report for people: one table a case."""
    parts = ["# Fake quantisation", environment_lines(report.environment), f"Allocator: {report.allocator}."]
    for case in dict.fromkeys(row.case for row in report.rows):
        rows = [row for row in report.rows if row.case == case]
        columns = {
            "candidate": [f"**{row.candidate}**" if row.ours else row.candidate for row in rows],
            rows[0].unit: [f"{row.time:.3g}" for row in rows],
            "to floor": [f"{row.to_floor:.2f}" for row in rows],
        }
        if any(row.speed_over_torch is not None for row in rows):
            against = ("" if row.speed_over_torch is None else f"{row.speed_over_torch:.1f}" for row in rows)
            columns["times torch"] = list(against)
        parts.append(section(case, table_of_columns(columns)))
    missing = bullets(f"{u.candidate} ({u.where}): {u.reason}" for u in report.unavailable)
    return page([*parts, f"Did not run:\n\n{missing}" if missing else "", bullets(report.notes)])


FORMATS: Final = {"md": qat_markdown, "png": qat_png}
