"""The picture of a TradeOff: every configuration, the front, uniform lines, and the pair of equal quality."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from pyquant.report.plot import TEXT, new_figure, saved, without_frame
from pyquant.report.records.trade_off import TradeOff

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FRONT, _PAIR = "#000000", "#D01C1C"
_LARGER: Final = {"us": ((1e6, "s"), (1e3, "ms")), "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))}


def scale_of(record: TradeOff) -> tuple[float, str]:
    """By what costs are divided so that the largest reads well, and the unit's name then.

    Example:
        >>> from pyquant.report.records.trade_off import TradeOffAxis, TradeOffPoint, trade_off
        >>> scale_of(trade_off([TradeOffPoint({"a": "x"}, 2e4, 1.0)], "", TradeOffAxis("t", "us"), TradeOffAxis("q"),
        ...                    higher_is_better=True, formats=("x",)))
        (1000.0, 'ms')
    """
    largest = max(p.cost for p in record.points)
    for by, unit in _LARGER.get(record.cost.unit, ()):
        if largest >= 10 * by:
            return by, unit
    return 1.0, record.cost.unit


def picture(record: TradeOff, form: str) -> bytes:
    """The picture as PNG or SVG: equal records give equal SVG. Raises UnsupportedError where matplotlib is missing."""
    caption = record.caption + (f"; {record.command}" if record.command else "")
    return saved(_draw(record), caption, form, width=150, size=7)


def _draw(record: TradeOff) -> Figure:
    figure, axes = new_figure(10.2, 6.4)
    from matplotlib.lines import Line2D

    by, unit = scale_of(record)
    _scatter(record, axes, by)
    front = record.front
    axes.plot(
        [p.cost / by for p in front],
        [p.quality for p in front],
        color=_FRONT,
        linewidth=1.3,
        marker="o",
        markersize=4,
        markerfacecolor="white",
        zorder=4,
        label="Pareto front",
    )
    _lines(record, axes, by)
    if record.pair is not None:
        _pair(record, axes, by)
    for p in record.points:
        if p.chosen:
            axes.scatter(
                [p.cost / by],
                [p.quality],
                s=190,
                facecolors="none",
                edgecolors=_PAIR,
                linewidths=2.2,
                zorder=6,
                label="chosen",
            )
    axes.set_xlabel("\n".join(textwrap.wrap(record.cost.text(unit), 125)), fontsize=9.5)
    axes.set_ylabel("\n".join(textwrap.wrap(record.quality.text(), 66)), fontsize=9.5)
    axes.set_title(record.title, fontsize=12, pad=26)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    if max(abs(p.quality) for p in record.points) >= 1e4:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace(",", " "))
    without_frame(axes)
    handles = axes.get_legend_handles_labels()[0]
    if any(one.quality is not None for one in record.lines):
        star = {"color": _FRONT, "marker": "*", "linestyle": "none", "markersize": 9}
        handles.append(Line2D([], [], label="one format everywhere", **star))  # type: ignore[arg-type]
    figure.legend(handles=handles, fontsize=9, loc="outside upper right", ncol=4, frameon=False)
    return figure


def _scatter(record: TradeOff, axes: Axes, by: float) -> None:
    """Points coloured by how many groups are not in floating point, which no order of the layers decides."""
    from matplotlib.ticker import MaxNLocator

    n, floating = len(record.groups), record.formats[0]
    drawn = None
    for measured in (True, False):
        points = [p for p in record.points if p.measured is measured]
        if not points:
            continue
        lowered = [sum(f != floating for f in p.configuration.values()) for p in points]
        xy: tuple[list[float], list[float]] = ([p.cost / by for p in points], [p.quality for p in points])
        predicted = {"s": 20, "marker": "x", "linewidths": 0.9, "label": "predicted"}
        look: dict[str, Any] = {"s": 18, "alpha": 0.75} if measured else predicted
        drawn = axes.scatter(*xy, c=lowered, cmap="viridis_r", vmin=0, vmax=max(n, 1), zorder=2, **look)
    if drawn is not None:
        bar = axes.figure.colorbar(drawn, ax=axes, pad=0.015, fraction=0.04)
        bar.set_label(f"groups not in {floating}, of {n}", fontsize=9)
        bar.locator = MaxNLocator(integer=True)
        bar.update_ticks()


def _lines(record: TradeOff, axes: Axes, by: float) -> None:
    """Vertical lines with their names above the axes; names of close lines stand on the outer sides of theirs."""
    if not record.lines:
        return
    base = record.lines[0].cost
    left, right = axes.get_xlim()
    lines = sorted(record.lines, key=lambda one: one.cost)
    close = [(b.cost - a.cost) / by < 0.19 * (right - left) for a, b in pairwise(lines)]
    for line, before, after in zip(lines, [False, *close], [*close, False], strict=True):
        x = line.cost / by
        place = (x - left) / (right - left)
        side = "left" if place < 0.08 else "right" if place > 0.92 else "center"
        if before != after:
            side = "left" if before else "right"
        axes.axvline(x, color="#777777", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        share = "" if line is record.lines[0] else f" ({(line.cost / base - 1) * 100:+.0f} %)"
        offset = ({"left": 2, "right": -2, "center": 0}[side], 15 if before and after else 4)
        axes.annotate(
            line.name + share,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            fontsize=9,
            color=TEXT,
        )
        if line.quality is not None:
            axes.scatter([x], [line.quality], s=70, marker="*", color="black", zorder=5)


def _pair(record: TradeOff, axes: Axes, by: float) -> None:
    pair = record.pair
    if pair is None:
        return
    slow, fast = record.points[pair.slow], record.points[pair.fast]
    ends = (fast.cost / by, slow.cost / by)
    axes.annotate(
        "",
        (ends[0], slow.quality),
        xytext=(ends[1], slow.quality),
        arrowprops={"arrowstyle": "<->", "color": _PAIR, "linewidth": 2, "shrinkA": 0, "shrinkB": 0},
        zorder=6,
    )
    from matplotlib.patheffects import withStroke

    axes.annotate(
        f"{pair.reduction * 100:.0f} % less {record.cost.name} at equal {record.quality.name}",
        (sum(ends) / 2, slow.quality),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=10,
        color=_PAIR,
        zorder=7,
        path_effects=[withStroke(linewidth=3.5, foreground="white")],
    )
