"""Records -> JSON, CSV, Markdown. Files are written whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pyquant.io import strict_json
from pyquant.io.atomic import write_file
from pyquant.results.bench import Bar, GemmReport, GemmRow, ModelReport, Verdict, to_dict
from pyquant.results.environment import Environment
from pyquant.results.record import KINDS, to_plain

_GEMM_COLUMNS = (
    "m", "k", "n", "candidate", "ours", "median_us", "ratio", "spread", "rounds", "floor_us", "floor_kind", "of_floor",
    "exact", "sqnr_db", "kernel", "moved_bytes", "ops", "peak", "energy_mj",
)  # fmt: skip


def to_json(record: Any) -> str:
    """The record as JSON, a row a line; infinities are written as strings, as JSON has none."""
    has_kind = any(type(record) is cls for cls, _ in KINDS.values())
    return strict_json.compact(to_plain(record) if has_kind else to_dict(record)).decode()


def to_csv(report: GemmReport) -> str:
    """The rows of a GEMM report as CSV, one header line; the environment stays in the JSON."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_GEMM_COLUMNS)
    for row in report.rows:
        writer.writerow([_csv_cell(getattr(row, name)) for name in _GEMM_COLUMNS])
    return out.getvalue()


def gemm_markdown(report: GemmReport, title: str = "Linear layers, side by side") -> str:
    """A GEMM report for people: environment, bars, a table for each M (columns K x N), ceilings, what did not run."""
    parts = [f"# {title}", _environment(report.environment)]
    if report.bars:
        parts += ["## Bars", bars_table(report.bars)]
    if report.verdicts:
        parts += ["## Goals", verdicts_table(report.verdicts)]
    for m in sorted({row.m for row in report.rows}):
        rows = [row for row in report.rows if row.m == m]
        parts += [f"## M = {m}", _gemm_table(rows)]
        if any(row.energy_mj is not None for row in rows):
            parts.append(_energy_table(rows))
    if report.ceilings:
        parts.append("Measured limits: " + "; ".join(f"{c.name} {c.value:.0f} {c.unit}" for c in report.ceilings) + ".")
    if report.unavailable:
        lines = _grouped((u.candidate, u.reason) for u in report.unavailable)
        parts += ["## Did not run", "\n".join(f"- {name}: {reason} ({count}x)" for (name, reason), count in lines)]
    if report.notes:
        parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def model_markdown(report: ModelReport, title: str | None = None) -> str:
    """A model report for people: environment, the table, bars, and each variant's worst sentence."""
    parts = [f"# {title or report.model}", f"{report.model}; {report.data}", _environment(report.environment)]
    parts.append(model_table(report))
    if report.bars:
        parts += ["## Bars", bars_table(report.bars)]
    worst = [f"- {r.variant}: {r.cosine_min:.5f}: {r.worst_text}" for r in report.rows if r.worst_text]
    if worst:
        parts += ["## Worst sentence", "\n".join(worst)]
    if report.notes:
        parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def model_table(report: ModelReport) -> str:
    """The rows of a model report as a Markdown table."""
    inputs = list(report.rows[0].latency_ms) if report.rows else []
    header = ["variant", "state MB", *[f"{name}, ms (x {report.baseline})" for name in inputs]]
    header += ["cosine mean", "cosine min", "same nearest", "reloaded"]
    rows = [
        [
            row.variant, f"{row.state_bytes / 1e6:.1f}",
            *[f"{row.latency_ms[name]:.2f} ({row.speedup[name]:.2f})" for name in inputs],
            f"{row.cosine_mean:.5f}", f"{row.cosine_min:.5f}", f"{row.nearest_same:.1%}", _reloaded(row.reload_equal),
        ]
        for row in report.rows
    ]  # fmt: skip
    return table(header, rows)


def bars_table(bars: Sequence[Bar]) -> str:
    """Goals against measurements with PASS or FAIL."""
    return table(
        ["bar", "goal", "measured", ""],
        [
            [b.name, f"{b.direction} {b.goal:g} {b.unit}".rstrip(), f"{b.measured:.4g}", "PASS" if b.passed else "FAIL"]
            for b in bars
        ],
    )


def verdicts_table(verdicts: Sequence[Verdict]) -> str:
    """Goals of the GPU kernels against measurements, with PASS, MISS or not measured."""
    return table(
        ["goal", "what", "against", "measured", "floor", "stretch", "", "over"],
        [
            [
                v.goal, v.name, v.peer, "-" if v.measured is None else f"{v.measured:.3f}x", f"{v.floor:g}x",
                f"{v.stretch:g}x", v.verdict, v.note or f"{v.shapes} shapes",
            ]
            for v in verdicts
        ],
    )  # fmt: skip


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


def _environment(environment: Environment) -> str:
    return f"{environment.line()}\n\nCommand: `{environment.command}`"


def _gemm_table(rows: Sequence[GemmRow]) -> str:
    return _shapes_table("us (ratio, share of limit)", rows, _gemm_cell)


def _energy_table(rows: Sequence[GemmRow]) -> str:
    return _shapes_table("energy per call, mJ", rows, _energy_cell)


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


def _reloaded(equal: bool | None) -> str:
    return "-" if equal is None else ("bits equal" if equal else "BITS DIFFER")


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[tuple[str, str], int]]:
    counts: dict[tuple[str, str], int] = {}
    for pair in pairs:
        counts[pair] = counts.get(pair, 0) + 1
    return list(counts.items())


def _csv_cell(value: object) -> object:
    return "" if value is None else (f"{value:.6g}" if isinstance(value, float) else value)
