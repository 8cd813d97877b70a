"""A ModelReport as Markdown and a picture; FORMATS is what the registry finds here."""

from __future__ import annotations

from typing import Final

from pyquant.report.plot import model_png
from pyquant.report.records.bench import ModelReport
from pyquant.report.render import bars_section, bullets, environment_lines, page, section, table


def model_markdown(report: ModelReport, title: str | None = None) -> str:
    """A model report for people: environment, the table, bars, and each variant's worst sentence."""
    worst = bullets(f"{r.variant}: {r.cosine_min:.5f}: {r.worst_text}" for r in report.rows if r.worst_text)
    return page([
        f"# {title or report.model}", f"{report.model}; {report.data}", environment_lines(report.environment),
        model_table(report), bars_section(report.bars), section("Worst sentence", worst), bullets(report.notes),
    ])  # fmt: skip


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


def _reloaded(equal: bool | None) -> str:
    return "-" if equal is None else ("bits equal" if equal else "BITS DIFFER")


FORMATS: Final = {"md": model_markdown, "png": model_png}
