"""An ErrorReport as Markdown and CSV; FORMATS is what the registry finds here."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Final

from pyquant.errors import ArgumentError
from pyquant.report import registry
from pyquant.report.records.errors import ErrorReport, TensorError
from pyquant.report.render import bullets, csv_text, page, table

_HEADS = ("layer", "tensor", "scheme", "SQNR dB", "cosine", "MAE", "MSE", "largest", "clipped", "KL nats")


def error_table(report: ErrorReport) -> str:
    """The rows as a Markdown table that also reads well in a terminal, and what is not in it, with its reason."""
    rows = [
        (
            row.layer or "(whole model)",
            row.tensor,
            row.scheme if row.clip_share is not None else "",
            f"{row.sqnr_db:.1f}",
            f"{row.cosine:.6f}",
            f"{row.mae:.3g}",
            f"{row.mse:.3g}",
            f"{row.max_error:.3g}",
            "" if row.clip_share is None else f"{row.clip_share:.3%}",
            "" if row.kl is None else f"{row.kl:.3g}",
        )
        for row in report.rows
    ]
    notes = bullets(f"{name}: {why}" for name, why in report.skipped.items())
    return table(_HEADS, rows) + (f"\n\nNot compared:\n{notes}" if notes else "")


def errors_markdown(report: ErrorReport) -> str:
    """The table under a title, with what its columns mean."""
    return page([f"# Errors of {report.model} on {report.batches} batches", _LEGEND, error_table(report)])


def errors_csv(report: ErrorReport) -> str:
    """A line a tensor; what is not known is empty."""
    names = [f.name for f in fields(TensorError)]
    rows = ([getattr(row, name) for name in names] for row in report.rows)
    return csv_text(names, ([None if v != v else v for v in row] for row in rows))


def write_errors(report: ErrorReport, path: str | Path) -> Path:
    """Write a report as .md, .csv or .json (`pyquant report` reads that), whole or not at all. -> the path.

    Raises ArgumentError for another ending.
    """
    ending = Path(path).suffix.removeprefix(".")
    if ending not in ("json", *FORMATS):
        raise ArgumentError("path", str(path), "a name that ends in .md, .csv or .json")
    return registry.write(report, Path(path).parent, Path(path).stem, (ending,))[0]


_LEGEND = (
    "Each tensor against the float model's. weight, input: rounding and clipping of that tensor; alone: the layer's "
    "result, fed by the float model; output: its result in the quantised model. MAE, MSE, largest: in the unit of the "
    "tensor (squared). clipped: share of the numbers beyond the codes. KL: of the histogram of results."
)

FORMATS: Final = {"md": errors_markdown, "csv": errors_csv}
