"""A CalibReport as Markdown; FORMATS is what the registry finds here."""

from __future__ import annotations

from typing import Final

from pyquant.report.records.bench import CALIBRATION_DATA, CalibReport
from pyquant.report.render import bars_section, bullets, environment_lines, page, section, table


def calib_markdown(report: CalibReport) -> str:
    """Bars, cost of collecting and searching, and the table of amax for each width."""
    collect = table(
        ["candidate", "ms", "x torch.histc"],
        [[row.candidate, f"{row.median_ms:.3f}", f"{row.ratio:.2f}"] for row in report.collect],
    )
    search = table(
        ["method", "bits", "ms", "data"],
        [[row.method, row.bits, f"{row.slowest_ms:.2f}", row.slowest_on] for row in report.search],
    )
    parts = ["# Calibration", environment_lines(report.environment), bars_section(report.bars)]
    parts += [section("Collecting 65 536 numbers", collect)]
    parts += [section("Searching a range, the slowest of the data sets", search)]
    for bits in (8, 4):
        rows = [
            [row.method, *(f"{a:.4f} ({db:.2f} dB)" for a, db in zip(row.amax, row.sqnr_db, strict=True))]
            for row in report.amax
            if row.bits == bits
        ]
        parts.append(section(f"amax and SQNR, int{bits}", table(["method", *CALIBRATION_DATA], rows)))
    missing = [f"Did not run: {u.candidate} ({u.reason})." for u in report.unavailable]
    return page([*parts, *missing, bullets(report.notes)])


FORMATS: Final = {"md": calib_markdown}
