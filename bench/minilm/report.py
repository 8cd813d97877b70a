"""The report of `python -m bench.minilm`: what is measured of a model under each scheme, as Markdown and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyquant.errors import UnsupportedError
from pyquant.report.plot import BASE, OURS, PEER, bars, new_figure, saved
from pyquant.report.records.bench import Bar
from pyquant.report.records.environment import Environment
from pyquant.report.render import bars_section, bullets, environment_lines, page, section, table


@dataclass(frozen=True)
class ModelRow:
    """A model under one scheme. bytes of parameters and buffers; latencies in ms keyed by the input's name.

    speedup       against the baseline row of the same run, same keys as latency_ms.
    cosine_mean, cosine_min   between this model's embedding of a sentence and the baseline's.
    worst_text    the sentence of cosine_min.
    nearest_same  share of sentences whose nearest neighbour stays the same.
    reload_equal  saved, loaded by another process, and every output bit equal; None where nothing was saved.
    """

    variant: str
    state_bytes: int
    latency_ms: dict[str, float]
    speedup: dict[str, float]
    cosine_mean: float
    cosine_min: float
    nearest_same: float
    worst_text: str = ""
    file_bytes: int | None = None
    reload_equal: bool | None = None
    ours: bool = False


@dataclass(frozen=True)
class ModelReport:
    """One model under several schemes, one run."""

    environment: Environment
    model: str
    data: str
    baseline: str
    rows: list[ModelRow]
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def model_markdown(report: ModelReport, title: str | None = None) -> str:
    """A model report for people: environment, the table, bars, and each variant's worst sentence."""
    worst = bullets(f"{r.variant}: {r.cosine_min:.5f}: {r.worst_text}" for r in report.rows if r.worst_text)
    return page(
        [
            f"# {title or report.model}",
            f"{report.model}; {report.data}",
            environment_lines(report.environment),
            model_table(report),
            bars_section(report.bars),
            section("Worst sentence", worst),
            bullets(report.notes),
        ]
    )


def model_table(report: ModelReport) -> str:
    """The rows of a model report as a Markdown table."""
    inputs = list(report.rows[0].latency_ms) if report.rows else []
    header = ["variant", "state MB", *[f"{name}, ms (x {report.baseline})" for name in inputs]]
    header += ["cosine mean", "cosine min", "same nearest", "reloaded"]
    rows = [
        [
            row.variant,
            f"{row.state_bytes / 1e6:.1f}",
            *[f"{row.latency_ms[name]:.2f} ({row.speedup[name]:.2f})" for name in inputs],
            f"{row.cosine_mean:.5f}",
            f"{row.cosine_min:.5f}",
            f"{row.nearest_same:.1%}",
            _reloaded(row.reload_equal),
        ]
        for row in report.rows
    ]
    return table(header, rows)


def _reloaded(equal: bool | None) -> str:
    return "-" if equal is None else ("bits equal" if equal else "BITS DIFFER")


def model_png(report: ModelReport) -> bytes:
    """Panels of bars, one bar a variant: size, latency of each input, distance of the embeddings; PNG.

    Raises UnsupportedError when matplotlib is not installed or the report has no rows.
    """
    if not report.rows:
        raise UnsupportedError("nothing to plot: the report has no rows")
    panels = _model_panels(report)
    across = 2
    down = -(-len(panels) // across)
    figure, axes = new_figure(11.5, 1.0 + down * (0.7 + 0.34 * len(report.rows)), down, across)
    colours = [BASE if i == 0 else (OURS if row.ours else PEER) for i, row in enumerate(report.rows)]
    for i, axis in enumerate(axes.flat):
        if i < len(panels):
            names = ["" if i % across else row.variant for row in report.rows]
            bars(axis, names, colours, *panels[i])
        else:
            axis.set_axis_off()
    figure.suptitle(f"{report.model}: {report.data}", fontsize=12)
    caption = f"{report.environment.line()}. Blue: pyquant; orange: others; grey: {report.baseline}."
    return saved(figure, caption)


def _model_panels(report: ModelReport) -> list[tuple[str, list[float], list[str]]]:
    """(title, values, labels) of each panel."""
    rows, base = report.rows, report.rows[0]
    smaller = [base.state_bytes / max(r.state_bytes, 1) for r in rows]
    sizes = [r.state_bytes / 1e6 for r in rows]
    panels = [
        (
            "size of the model, MB",
            sizes,
            [f"{mb:.1f}  ({x:.1f}x smaller)" for mb, x in zip(sizes, smaller, strict=True)],
        ),
        (
            f"1 - cosine to {report.baseline}, mean over sentences (cosine: mean, worst)",
            [max(0.0, 1 - r.cosine_mean) for r in rows],
            [f"{max(0.0, 1 - r.cosine_mean):.4f}  ({r.cosine_mean:.4f}, {r.cosine_min:.4f})" for r in rows],
        ),
    ]
    for name in base.latency_ms:
        labels = [f"{r.latency_ms[name]:.2f}  ({r.speedup[name]:.2f}x as fast)" for r in rows]
        panels.append((f"latency, {name}, ms", [r.latency_ms[name] for r in rows], labels))
    for _, _, labels in panels:
        labels[0] = labels[0].split("  (")[0]  # the baseline is not compared with itself
    return panels
