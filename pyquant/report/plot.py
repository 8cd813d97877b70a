"""Pictures of records. matplotlib is an extra (`pip install matplotlib`); it draws without a display."""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pyquant.errors import UnsupportedError
from pyquant.report.records.bench import GemmReport, GemmRow, QatReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito: distinguishable with colour-vision deficiency
OURS, PEER, BASE = "#0072B2", "#E69F00", "#7f7f7f"
GREY, TEXT = "#d0d0d0", "#444444"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f7f7f", "#000000")
OUR_MARKS, PEER_MARKS = "os^Dv", "x+1"


def gemm_png(report: GemmReport) -> bytes:
    """Speed against the baseline over M (geometric mean over K x N), a line a candidate; PNG.

    Raises UnsupportedError when matplotlib is not installed or the report has no rows.
    """
    if not report.rows:
        raise UnsupportedError("nothing to plot: the report has no rows")
    figure, axes = new_figure(9.5, 5.4)
    ms = sorted({row.m for row in report.rows})
    names = [n for n in dict.fromkeys(row.candidate for row in report.rows) if n != report.baseline]
    for i, name in enumerate(names):
        points = [(m, _mean_ratio(report.rows, name, m)) for m in ms]
        drawn = [(m, r) for m, r in points if r is not None]
        ours = any(row.ours for row in report.rows if row.candidate == name)
        axes.plot(
            [ms.index(m) for m, _ in drawn],
            [r for _, r in drawn],
            marker=_marker(i, ours=True),
            linewidth=2.6 if ours else 1.4,
            linestyle="-" if ours else "--",
            color=LINES[i % len(LINES)],
            label=name,
            zorder=3 if ours else 2,
        )
    axes.axhline(1.0, color="black", linewidth=1)
    axes.annotate(report.baseline, (0, 1.0), textcoords="offset points", xytext=(2, 4), fontsize=9)
    axes.set_xticks(range(len(ms)), [str(m) for m in ms])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("M (rows)")
    axes.set_ylabel(f"times faster than {report.baseline}")
    shapes = len({(row.k, row.n) for row in report.rows})
    axes.set_title(f"Linear layers: geometric mean over {shapes} shapes (K x N); solid lines: pyquant", fontsize=11)
    axes.grid(axis="y", color=GREY, linewidth=0.6)
    axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return saved(figure, report.environment.line())


def _marker(place: int, *, ours: bool) -> str:
    """Colours come again after eight series; then the marker is another one."""
    marks = OUR_MARKS if ours else PEER_MARKS
    return marks[place // len(LINES) % len(marks)]


def _joined(limits: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """(place, text) of labels on a logarithmic axis: those that would cover one another become lines of one."""
    groups: list[list[tuple[float, str]]] = []
    for limit in sorted(limits, reverse=True):
        if groups and groups[-1][-1][0] < 1.15 * limit[0]:
            groups[-1].append(limit)
        else:
            groups.append([limit])
    middles = [math.sqrt(group[0][0] * group[-1][0]) for group in groups]
    return [(at, "\n".join(text for _, text in group)) for at, group in zip(middles, groups, strict=True)]


def roofline_png(report: GemmReport) -> bytes:
    """Operations a second over operations a byte, a point a candidate and shape, under measured limits; PNG.

    Raises UnsupportedError when matplotlib is not installed, or when no row says what it moved and computed.
    """
    rows = [row for row in report.rows if row.moved_bytes and row.ops]
    if not rows:
        raise UnsupportedError("nothing to plot: no row says how many bytes and operations it needs")
    figure, axes = new_figure(10.5, 6.0)
    names = list(dict.fromkeys(row.candidate for row in rows))
    for i, name in enumerate(names):
        mine = [row for row in rows if row.candidate == name]
        axes.scatter(
            [row.ops / row.moved_bytes for row in mine],
            [row.ops / row.median_us * 1e-6 for row in mine],
            s=22 if mine[0].ours else 14,
            marker=_marker(i, ours=mine[0].ours),
            color=LINES[i % len(LINES)],
            alpha=0.75,
            label=name,
            zorder=3 if mine[0].ours else 2,
        )
    copy = next((c.value for c in report.ceilings if c.name == "copy"), None)
    reach = [row.ops / row.moved_bytes for row in rows]
    limits: list[tuple[float, str]] = []
    for ceiling in report.ceilings if copy else ():
        peak = ceiling.value * 1e-3
        if ceiling.unit != "Gop/s" or ceiling.name not in {row.peak for row in rows} or not copy:
            continue
        ridge = ceiling.value / copy
        ends = (min(*reach, ridge), max(*reach, ridge))
        axes.plot([ends[0], ridge, ends[1]], [ends[0] * copy * 1e-3, peak, peak], color="black", linewidth=1)
        limits.append((peak, f"{ceiling.name} {peak:.0f}"))
    beside = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "xytext": (4, 0)}
    for peak, text in _joined(limits):
        axes.annotate(text, (1.0, peak), va="center", fontsize=8, **beside)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte that has to be moved")
    axes.set_ylabel("10^12 operations a second")
    limit = f"; limits: {copy:.0f} GB/s copied and the peaks, of the same run" if copy else ""
    axes.set_title(f"Linear layers on the roofline{limit}", fontsize=11)
    axes.grid(color=GREY, linewidth=0.5)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.08, 1.0))
    return saved(figure, report.environment.line())


def qat_png(report: QatReport) -> bytes:
    """A panel of bars a case, one bar a candidate: its time, and in brackets over the floor's; PNG.

    Raises UnsupportedError when matplotlib is not installed or the report has no rows.
    """
    cases = list(dict.fromkeys(row.case for row in report.rows))
    if not cases:
        raise UnsupportedError("nothing to plot: the report has no rows")
    figure, axes = new_figure(10.5, 1.0 + 0.7 * len(cases) + 0.32 * len(report.rows), len(cases), squeeze=False)
    for axis, case in zip(axes.flat, cases, strict=True):
        rows = [row for row in report.rows if row.case == case]
        colours = [OURS if row.ours else BASE if row.to_floor == 1 else PEER for row in rows]
        labels = [f"{row.time:.3g}  ({row.to_floor:.2f} of the floor)" for row in rows]
        names = [row.candidate for row in rows]
        bars(axis, names, colours, f"{case}, {rows[0].unit}", [row.time for row in rows], labels)
    caption = f"{report.environment.line()}. Blue: pyquant; orange: others; grey: the floor."
    return saved(figure, caption)


def bars(
    axis: Axes, names: Sequence[str], colours: Sequence[str], title: str, values: Sequence[float], labels: Sequence[str]
) -> None:
    """Horizontal bars from zero, the first on top, each with its name and its label."""
    places = list(range(len(values)))[::-1]
    axis.barh(places, values, color=colours, height=0.7)
    widest = max(max(values), 1e-12)
    for place, value, label in zip(places, values, labels, strict=True):
        axis.text(value + 0.015 * widest, place, label, va="center", fontsize=9)
    axis.set_xlim(0, widest * 1.6)  # from zero, so that lengths may be compared; the rest is room for the labels
    axis.set_yticks(places, names, fontsize=10)
    axis.tick_params(axis="y", length=0)
    axis.set_title(title, fontsize=10, loc="left")
    without_frame(axis)


def _mean_ratio(rows: Sequence[GemmRow], name: str, m: int) -> float | None:
    """Geometric mean over the shapes of one M; None where a shape is missing: other shapes would mislead."""
    of_m = [row for row in rows if row.m == m]
    ratios = [row.ratio for row in of_m if row.candidate == name]
    shapes = {(row.k, row.n) for row in of_m}
    return statistics.geometric_mean(ratios) if ratios and len(ratios) == len(shapes) else None


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, *, squeeze: bool = True
) -> tuple[Figure, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("plots need matplotlib, which is not installed: pip install matplotlib") from None
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=squeeze)


def saved(figure: Figure, caption: str, form: str = "png", *, width: int = 130, size: int = 8) -> bytes:
    """The bytes of a figure with a caption below it; equal figures give equal SVG.

    width, size  of the caption: characters a line, and points.
    """
    import matplotlib

    figure.supxlabel("\n".join(textwrap.wrap(caption, width)), fontsize=size, color=TEXT)
    picture = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "pyquant", "svg.fonttype": "none"}):
        figure.savefig(picture, format=form, metadata={"Date": None} if form == "svg" else {"Software": None})
    return picture.getvalue()


def without_frame(axes: Axes, sides: Sequence[str] = ("top", "right")) -> None:
    for side in sides:
        axes.spines[side].set_visible(False)


def in_forms(draw: Callable[..., bytes]) -> dict[str, Callable[[Any], bytes]]:
    """The entries of a FORMATS for draw(record, format)."""
    return {form: partial(draw, form=form) for form in ("png", "svg")}
