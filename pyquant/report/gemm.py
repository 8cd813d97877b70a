"""A GemmReport as Markdown, CSV and a picture; FORMATS is what the registry finds here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from pyquant.report.plot import gemm_png, roofline_png
from pyquant.report.records.bench import GemmReport, GemmRow, Verdict
from pyquant.report.render import bars_section, bullets, csv_text, environment_lines, page, section, table

_GEMM_COLUMNS = (
    "m",
    "k",
    "n",
    "candidate",
    "ours",
    "median_us",
    "ratio",
    "spread",
    "rounds",
    "floor_us",
    "floor_kind",
    "of_floor",
    "exact",
    "sqnr_db",
    "kernel",
    "moved_bytes",
    "ops",
    "peak",
    "energy_mj",
)


def to_csv(report: GemmReport) -> str:
    """The rows of a GEMM report as CSV, one header line; the environment stays in the JSON."""
    return csv_text(_GEMM_COLUMNS, ([getattr(row, name) for name in _GEMM_COLUMNS] for row in report.rows), 6)


def gemm_markdown(report: GemmReport, title: str = "Linear layers, side by side") -> str:
    """A GEMM report for people: environment, bars, a table for each M (columns K x N), ceilings, what did not run."""
    parts = [f"# {title}", environment_lines(report.environment), bars_section(report.bars)]
    if report.verdicts:
        parts.append(section("Goals", verdicts_table(report.verdicts)))
    for m in sorted({row.m for row in report.rows}):
        rows = [row for row in report.rows if row.m == m]
        parts.append(section(f"M = {m}", _shapes_table("us (ratio, share of limit)", rows, _gemm_cell)))
        if any(row.energy_mj is not None for row in rows):
            parts.append(_shapes_table("energy per call, mJ", rows, _energy_cell))
    if report.ceilings:
        parts.append("Measured limits: " + "; ".join(f"{c.name} {c.value:.0f} {c.unit}" for c in report.ceilings) + ".")
    counts = Counter((u.candidate, u.reason) for u in report.unavailable)
    missing = bullets(f"{name}: {reason} ({count}x)" for (name, reason), count in counts.items())
    return page([*parts, section("Did not run", missing), bullets(report.notes)])


def verdicts_table(verdicts: Sequence[Verdict]) -> str:
    """Goals of the GPU kernels against measurements, with PASS, MISS or not measured."""
    return table(
        ["goal", "what", "against", "measured", "floor", "stretch", "", "over"],
        [
            [
                v.goal,
                v.name,
                v.peer,
                "-" if v.measured is None else f"{v.measured:.3f}x",
                f"{v.floor:g}x",
                f"{v.stretch:g}x",
                v.verdict,
                v.note or f"{v.shapes} shapes",
            ]
            for v in verdicts
        ],
    )


def _shapes_table(what: str, rows: Sequence[GemmRow], cell: Callable[[GemmRow | None], str]) -> str:
    """A line a candidate, a column a (K, N)."""
    shapes = sorted({(row.k, row.n) for row in rows}, key=lambda kn: (kn[0] * kn[1], kn))
    names = list(dict.fromkeys(row.candidate for row in rows))
    at = {(row.candidate, row.k, row.n): row for row in rows}
    header = [what, *[f"{k}x{n}" for k, n in shapes]]
    return table(header, [[name, *[cell(at.get((name, k, n))) for k, n in shapes]] for name in names])


def _energy_cell(row: GemmRow | None) -> str:
    return "-" if row is None or row.energy_mj is None else f"{row.energy_mj:.3g}"


def _gemm_cell(row: GemmRow | None) -> str:
    if row is None:
        return "-"
    time = f"{row.median_us:.0f}" if row.median_us >= 100 else f"{row.median_us:.1f}"
    inside = [f"{row.ratio:.2f}x"]
    if row.of_floor is not None:
        inside.append(f"{row.of_floor:.0%}")
    return f"{time} ({', '.join(inside)}){'' if row.exact is not False else ' NOT EXACT'}"


def picture(report: GemmReport) -> bytes:
    """Rows of a GPU under their limits; elsewhere, and where rows do not say what they moved, speed over M. PNG."""
    on_roofline = report.environment.gpu and any(row.moved_bytes and row.ops for row in report.rows)
    return roofline_png(report) if on_roofline else gemm_png(report)


FORMATS: Final = {"md": gemm_markdown, "csv": to_csv, "png": picture}
