"""A TradeOff as Markdown and CSV; FORMATS is what the registry finds here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyquant.report.plot import in_forms
from pyquant.report.records.trade_off import TradeOff, TradeOffPoint
from pyquant.report.render import bullets, csv_text, page, section, table
from pyquant.report.trade_off_html import to_html
from pyquant.report.trade_off_plot import picture

Draw = Callable[[TradeOff], str | bytes]
_FRONT_ROWS, _FIGURES = 25, 4  # at most, in Markdown; CSV has all


def to_csv(record: TradeOff) -> str:
    """A row a point: its format for each group, latency with its interval, quality, further figures, marks."""
    figures = figure_names(record)
    cost = f"{record.cost.name}_{record.cost.unit}".rstrip("_")
    header = [*record.groups, cost, "low", "high", record.quality.name, *figures, "measured", "on_front", "chosen"]
    rows = (
        [
            *(p.configuration[group] for group in record.groups),
            p.cost,
            p.low,
            p.high,
            p.quality,
            *map(p.figures.get, figures),
            *map(int, (p.measured, p.on_front, p.chosen)),
        ]
        for p in record.points
    )
    return csv_text(header, rows, 10)


def to_markdown(record: TradeOff) -> str:
    """For people: the lines to compare with, the front, the pair of equal quality, and where the figures come from."""
    unit = f" [{record.quality.unit}]" if record.quality.unit else ""
    measured = sum(p.measured for p in record.points)
    summary = f"{len(record.points)} configurations, {measured} of them measured. Axes: {record.cost.text()}; "
    parts = [f"# {record.title}", summary + f"{record.quality.text()} ({better(record)})."]
    base = record.lines[0] if record.lines else None
    if base is not None:
        header = ["", _header(record), f"against {base.name}", record.quality.name + unit]
        rows = [[one.name, f"{one.cost:.1f}", change(one.cost, base.cost), number(one.quality)] for one in record.lines]
        parts.append(section("Reference", table(header, rows)))
    if chosen := [p for p in record.points if p.chosen]:
        parts.append(section("Chosen", _points(record, chosen)))
    front = record.front
    parts.append(section(f"Front: {len(front)} configurations", _points(record, thinned(front, _FRONT_ROWS))))
    if len(front) > _FRONT_ROWS:
        parts.append(f"{_FRONT_ROWS} of {len(front)}, evenly spread; all of them are in the CSV.")
    if record.pair is not None:
        slow, fast = record.points[record.pair.slow], record.points[record.pair.fast]
        text = f"Largest difference at equal {record.quality.name} ({number(slow.quality)}{unit}): "
        parts.append(section("Equal quality", text + f"{record.pair.reduction:.1%} less {record.cost.name}."))
        parts.append(_points(record, [slow, fast]))
    parts += [bullets(record.notes), record.caption, f"Command: `{record.command}`" if record.command else ""]
    return page(parts)


def _header(record: TradeOff) -> str:
    return record.cost.name + (f" [{record.cost.unit}]" if record.cost.unit else "")


def better(record: TradeOff) -> str:
    """Which way is better, in words."""
    return "higher is better" if record.higher_is_better else "lower is better"


def change(value: float, base: float) -> str:
    """A cost against the baseline."""
    share = (value / base - 1) * 100
    return f"{share:+.1f} %" if round(share, 1) else "0.0 %"


def number(value: float | None) -> str:
    """A quality as people read it: whole numbers in groups of three, others to five digits."""
    if value is None:
        return "-"
    return f"{int(value):,}".replace(",", " ") if value == int(value) else f"{value:.5g}"


def figure_names(record: TradeOff) -> tuple[str, ...]:
    """The names of all further figures, in order of appearance."""
    return tuple(dict.fromkeys(name for p in record.points for name in p.figures))


def thinned(points: tuple[TradeOffPoint, ...], most: int) -> list[TradeOffPoint]:
    """At most `most` of the points, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _points(record: TradeOff, points: list[TradeOffPoint]) -> str:
    base = record.lines[0].cost if record.lines else None
    figures = figure_names(record)[:_FIGURES]
    interval_of = "interval" + (f" [{record.cost.unit}]" if record.cost.unit else "")
    header = ["configuration", _header(record), *(["reduction"] if base else []), interval_of, record.quality.name]
    header += [name.replace("_us", " [us]") for name in figures]
    rows = []
    for p in points:
        interval = "-" if p.low is None or p.high is None else f"{p.low:.1f} .. {p.high:.1f}"
        latency = f"{p.cost:.1f}" + ("" if p.measured else " (predicted)")
        reduction = [f"{1 - p.cost / base:.1%}"] if base else []
        more = [number(p.figures.get(name)) for name in figures]
        rows.append([record.text_of(p), latency, *reduction, interval, number(p.quality), *more])
    return table(header, rows)


FORMATS: Final[dict[str, Draw]] = {"md": to_markdown, "csv": to_csv, **in_forms(picture), "html": to_html}
