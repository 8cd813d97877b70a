"""A SearchReport as Markdown, CSV, pictures and a page; FORMATS is what the registry finds here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pyquant.report.records.search import SHOWN, SearchedPoint, SearchReport
from pyquant.report.records.trade_off import TradeOff, TradeOffAxis, TradeOffPoint, trade_off
from pyquant.report.render import bullets, page, section, table
from pyquant.report.trade_off import FORMATS as trade_off_forms

_AXES: Final = {
    "us": TradeOffAxis("latency", "us", "sum of measured layers"),
    "bytes": TradeOffAxis("size", "bytes"),
    "bits": TradeOffAxis("effective bits", "bits", "bits a weight, on average"),
}
_ROWS: Final = 25


def to_trade_off(report: SearchReport) -> TradeOff:
    """The measured configurations as points of cost against loss."""
    points = [_point(report, i, p) for i, p in enumerate(report.points)]
    loss = TradeOffAxis("loss", "", f"{report.loss_unit} against the float model")
    record = trade_off(
        points,
        f"{report.model}: formats of {len(report.groups)} groups of layers",
        _AXES[report.cost_unit],
        loss,
        higher_is_better=False,
        formats=report.formats,
    )
    command = report.environment.get("command", "")
    environment = {name: text for name, text in report.environment.items() if name != "command"}
    notes = (report.verdict, *report.notes)
    return replace(record, pair=None, notes=notes, environment=environment, command=command)


def to_markdown(report: SearchReport) -> str:
    """For people: the verdict, the plan layer by layer, the front, the limits, and the cost of the search."""
    base = report.points[report.reference]
    unit = _scale(report.cost_unit)[1]
    parts = [f"# {report.model}: a format for every layer", report.verdict]
    parts.append(section("Plan", plan_table(report)))
    shown = report.front + [p for p in (base, report.plan) if not p.is_on_front]
    shown = list({id(p): p for p in sorted(shown, key=lambda p: p.cost)}.values())
    step = max(1, -(-len(shown) // _ROWS))
    rows_shown = [p for i, p in enumerate(shown) if i % step == 0 or p in (base, report.plan)]
    quality = report.quality_name or "quality"
    measured = table(
        ["", f"{unit} by the tables", "of float", "ms measured", "MB", "bits", "loss", quality],
        [_row(report, p, base) for p in rows_shown],
    )
    settings = ", ".join(f"{name} {value}" for name, value in sorted(report.settings.items()) if value)
    parts += [section("What was measured", measured), f"Settings: {settings}."]
    if report.counts:
        parts.append("Work: " + ", ".join(f"{count} {what}" for what, count in sorted(report.counts.items())) + ".")
    parts.append(bullets(report.notes))
    parts += [text if not name else f"{name}: `{text}`" for name, text in report.environment.items() if text]
    return page(parts)


def plan_table(report: SearchReport) -> str:
    """The chosen format of every group, its cost and loss, and what speaks against the others."""
    by, unit = _scale(report.cost_unit)
    rows = []
    for group in report.groups:
        format = report.plan.configuration[group.name]
        share = group.cost[format] / max(group.cost[report.formats[0]], 1e-300)
        figures = (f"{group.cost[format] / by:.3f}", f"{share:.2f}", f"{group.loss[format]:.3g}")
        rows.append([group.name, format, *figures, report.other_formats(group)])
    return table(["group", "format", unit, "of float", f"loss alone [{report.loss_unit}]", "other formats"], rows)


def _scale(unit: str) -> tuple[float, str]:
    """By what costs are divided in tables, and the unit's name then."""
    return SHOWN.get(unit, (1.0, unit))


def _row(report: SearchReport, p: SearchedPoint, base: SearchedPoint) -> list[str]:
    mark = "plan" if p is report.plan else "float" if p is base else ""
    by, _ = _scale(report.cost_unit)
    return [
        mark,
        f"{p.cost / by:.3f}",
        f"{p.cost / max(base.cost, 1e-300):.2f}",
        "-" if p.latency_us is None else f"{p.latency_us / 1e3:.3f}",
        f"{p.size_bytes / 1e6:.2f}",
        f"{p.effective_bits:.2f}",
        f"{p.loss:.3g}",
        "-" if p.quality is None else f"{p.quality:.4f}",
    ]


def _point(report: SearchReport, index: int, p: SearchedPoint) -> TradeOffPoint:
    figures = {
        "size_bytes": float(p.size_bytes),
        "effective_bits": p.effective_bits,
        "predicted_loss": p.predicted_loss,
        "quality": p.quality,
        "drop": p.drop,
        "end_to_end_us": p.latency_us,
    }
    present = {name: value for name, value in figures.items() if value is not None}
    return TradeOffPoint(p.configuration, p.cost, p.loss, chosen=index == report.chosen, figures=present)


def _drawn(draw: Callable[[TradeOff], str | bytes]) -> Callable[[SearchReport], str | bytes]:
    return lambda report: draw(to_trade_off(report))


FORMATS: Final = {"md": to_markdown} | {form: _drawn(draw) for form, draw in trade_off_forms.items() if form != "md"}
