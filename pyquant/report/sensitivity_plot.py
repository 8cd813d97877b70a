"""The picture of a SensitivityReport: the loss of every group and format, and what lowering more and more costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pyquant.report.plot import GREY, LINES, TEXT, new_figure, saved, without_frame
from pyquant.report.records.sensitivity import SensitivityReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHAPES = ("o", "s", "^", "D", "v", "P")  # distinguishable without colours too
_MOST = 50


def picture(record: SensitivityReport, form: str) -> bytes:
    """The picture as PNG or SVG: equal records give equal SVG. Raises UnsupportedError where matplotlib is missing."""
    # the most sensitive ones where there are too many, but always in the order of the model
    worst = {
        g: max((abs(record.sensitivity(g, f) or 0.0) for f in range(1, len(record.formats))), default=0.0)
        for g in range(len(record.groups))
    }
    shown = sorted(sorted(worst, key=lambda g: (-worst[g], g))[:_MOST])
    figure, (left, right) = new_figure(13.0, max(4.2, 1.7 + 0.26 * len(shown)), 1, 2)
    _groups(left, record, shown)
    _sums(right, record)
    title = f"Sensitivity of {record.model}: {record.metric}, {record.mode.replace('_', ' ')}"
    figure.suptitle(title, fontsize=12)
    caption = f"Scored on {record.scored_on}. {record.cost.line()}."
    if len(shown) < len(record.groups):
        caption = f"Shown are the {len(shown)} most sensitive of {len(record.groups)} groups. {caption}"
    return saved(figure, caption, form, width=150)


def _groups(axes: Axes, record: SensitivityReport, shown: list[int]) -> None:
    """A line a group, a mark a format."""
    values = {
        (g, f): s
        for g in shown
        for f in range(1, len(record.formats))
        if (s := record.sensitivity(g, f)) is not None and math.isfinite(s)
    }
    places = {g: len(shown) - 1 - i for i, g in enumerate(shown)}
    for g in shown:
        ends = [value for (at, _), value in values.items() if at == g]
        if ends:
            axes.plot([min(ends), max(ends)], [places[g]] * 2, color=GREY, linewidth=3, zorder=1)
    for f in range(1, len(record.formats)):
        mine = {g: value for (g, at), value in values.items() if at == f}
        axes.scatter(
            list(mine.values()),
            [places[g] for g in mine],
            marker=_SHAPES[(f - 1) % 6],
            color=LINES[(f - 1) % 6],
            s=34,
            label=record.formats[f],
            zorder=2,
        )
    _log_where_it_helps(axes.set_xscale, list(values.values()))
    labels = [record.groups[g].name + (" *" if record.groups[g].suspect else "") for g in shown]
    axes.set_yticks([places[g] for g in shown], [_shortened(label) for label in labels], fontsize=8)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    word = "loss" if record.additive or record.metric == "cosine" else record.metric
    word = (
        "gain of leaving the group out" if record.mode == "leave_one_out" else f"{word} with this group alone lowered"
    )
    axes.set_xlabel(f"{word} ({record.unit})")
    axes.set_title("in the order of the model; *: often sensitive", fontsize=9, loc="left")
    axes.grid(axis="x", color=GREY, linewidth=0.6)
    columns = max(1, len(record.formats) - 1)
    axes.legend(fontsize=9, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.995), ncols=min(4, columns))
    without_frame(axes)


def _sums(axes: Axes, record: SensitivityReport) -> None:
    """What it costs to lower more and more groups, the least sensitive first."""
    drawn: list[float] = []
    for f in range(1, len(record.formats)):
        steps = [s for s in record.steps if s.format == record.formats[f]]
        order = record.ranking(record.formats[f])[::-1]
        at = {group.name: g for g, group in enumerate(record.groups)}
        look = {"marker": _SHAPES[(f - 1) % 6], "color": LINES[(f - 1) % 6], "markersize": 4}
        if record.additive and record.mode != "leave_one_out":
            single = [max(0.0, record.sensitivity(at[name], f) or 0.0) for name in order]
            sums = [math.fsum(single[: k + 1]) for k in range(len(single))]
        elif record.mode == "leave_one_out" and record.additive and record.uniform[f] is not None:
            gains = [record.sensitivity(at[name], f) or 0.0 for name in order]
            sums = [(record.uniform[f] or 0.0) - math.fsum(gains[k + 1 :]) for k in range(len(gains))]
        else:
            sums = []
        if sums and (record.unit == record.step_unit or not steps):
            style = ":" if steps else "-"
            label = f"{record.formats[f]}, predicted: " + (
                "single losses added" if record.mode != "leave_one_out" else "gains taken off"
            )
            axes.plot(range(1, len(sums) + 1), sums, linestyle=style, label=label, **look)  # type: ignore[arg-type]
            drawn += sums
        if steps:
            losses = [s.loss for s in steps]
            axes.plot(range(1, len(losses) + 1), losses, label=f"{record.formats[f]}, measured", **look)  # type: ignore[arg-type]
            drawn += losses
    if not drawn:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"values of {record.metric!r} are no losses\nthat could be added", ha="center", color=TEXT)
        return
    _log_where_it_helps(axes.set_yscale, drawn)
    axes.set_xlabel("groups lowered, the least sensitive first")
    axes.set_ylabel(f"loss ({record.step_unit if record.steps else record.unit})")
    axes.set_title("what lowering more groups costs", fontsize=9, loc="left")
    axes.locator_params(axis="x", integer=True)
    axes.grid(color=GREY, linewidth=0.6)
    axes.legend(fontsize=9, frameon=False)
    without_frame(axes)


def _log_where_it_helps(set_scale: object, values: list[float]) -> None:
    positive = [v for v in values if v > 0]
    if positive and len(positive) == len(values) and max(positive) > 30 * min(positive):
        set_scale("log")  # type: ignore[operator]


def _shortened(name: str) -> str:
    return name if len(name) <= 48 else "..." + name[-45:]
