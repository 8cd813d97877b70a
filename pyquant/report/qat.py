"""A QatReport as Markdown and a picture; FORMATS is what the registry finds here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyquant.report.plot import qat_png
from pyquant.report.records.bench import QatReport


def qat_markdown(report: QatReport) -> str:
    """The report for people: one table a case."""
    parts = ["# Fake quantisation", report.environment.line(), f"Command: `{report.environment.command}`",
             f"Allocator: {report.allocator}."]  # fmt: skip
    for case in dict.fromkeys(row.case for row in report.rows):
        rows = [r for r in report.rows if r.case == case]
        against = any(r.speed_over_torch is not None for r in rows)
        lines = [f"## {case}", "", f"| candidate | {rows[0].unit} | to floor |" + (" times torch |" if against else "")]
        lines.append("|---|---|---|" + ("---|" if against else ""))
        for r in rows:
            name = f"**{r.candidate}**" if r.ours else r.candidate
            line = f"| {name} | {r.time:.3g} | {r.to_floor:.2f} |"
            lines.append(line + (f" {r.speed_over_torch:.1f} |" if r.speed_over_torch is not None else ""))
        parts.append("\n".join(lines))
    if report.unavailable:
        parts.append(
            "Did not run:\n\n" + "\n".join(f"- {u.candidate} ({u.where}): {u.reason}" for u in report.unavailable)
        )
    parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


FORMATS: Final[dict[str, Callable[[QatReport], str | bytes]]] = {"md": qat_markdown, "png": qat_png}
