"""An ErrorReport as Markdown and CSV; FORMATS is what the registry finds here."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Final

from pyquant.errors import ArgumentError
from pyquant.report.records.errors import ErrorReport, TensorError
from pyquant.report.records.record import save_record
from pyquant.report.render import table, write_text

_HEADS = ("layer", "tensor", "scheme", "SQNR dB", "cosine", "MAE", "MSE", "largest", "clipped", "KL nats")


def error_table(report: ErrorReport) -> str:
    """The rows as a Markdown table that also reads well in a terminal, and what is not in it, with its reason.

    Example:
        >>> row = TensorError("fc", "input", "int8 per_tensor", 10, 0.1, 0.02, 0.3, 31.0, 0.999, 0.001)
        >>> print(error_table(ErrorReport("Net", 1, (row,), {})).splitlines()[0])
        | layer | tensor | scheme          | SQNR dB | cosine   | MAE | MSE  | largest | clipped | KL nats |
    """
    rows = [
        (
            row.layer or "(whole model)", row.tensor, row.scheme if row.clip_share is not None else "",
            f"{row.sqnr_db:.1f}", f"{row.cosine:.6f}", f"{row.mae:.3g}", f"{row.mse:.3g}", f"{row.max_error:.3g}",
            "" if row.clip_share is None else f"{row.clip_share:.3%}", "" if row.kl is None else f"{row.kl:.3g}",
        )
        for row in report.rows
    ]  # fmt: skip
    notes = [f"- {name}: {why}" for name, why in report.skipped.items()]
    return "\n".join([table(_HEADS, rows), *(["", "Not compared:", *notes] if notes else [])])


def errors_markdown(report: ErrorReport) -> str:
    """The table under a title, with what its columns mean."""
    return f"# Errors of {report.model} on {report.batches} batches\n\n{_LEGEND}\n\n{error_table(report)}\n"


def errors_csv(report: ErrorReport) -> str:
    """A line a tensor; what is not known is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([f.name for f in fields(TensorError)])
    for row in report.rows:
        values = [getattr(row, f.name) for f in fields(TensorError)]
        writer.writerow(["" if v is None or (isinstance(v, float) and math.isnan(v)) else v for v in values])
    return out.getvalue()


def write_errors(report: ErrorReport, path: str | Path) -> Path:
    """Write a report as .md, .csv or .json (`pyquant report` reads that), whole or not at all. -> the path.

    Raises ArgumentError for another ending.
    """
    ending = Path(path).suffix.removeprefix(".")
    if ending == "json":
        return save_record(path, report)
    if ending not in FORMATS:
        raise ArgumentError("path", str(path), "a name that ends in .md, .csv or .json")
    return write_text(path, FORMATS[ending](report))


_LEGEND = (
    "Each tensor against the float model's. weight, input: rounding and clipping of that tensor; alone: the layer's "
    "result, fed by the float model; output: its result in the quantised model. MAE, MSE, largest: in the unit of the "
    "tensor (squared). clipped: share of the numbers beyond the codes. KL: of the histogram of results."
)

FORMATS: Final[dict[str, Callable[[ErrorReport], str]]] = {"md": errors_markdown, "csv": errors_csv}
