"""Pictures of calibrations: the histogram with every method's range, and what each range costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from pyquant.errors import UnsupportedError
from pyquant.io.atomic import write_file
from pyquant.report.plot import GREY, LINES, new_figure, saved, without_frame

_Mark = tuple[tuple[float, ...], str, dict[str, Any]]  # where lines stand, what they are called, how they look
_BELOW: Final = {"frameon": False, "loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncol": 2}


class Compared(Protocol):
    """What is drawn of a method (calibrate.Comparison)."""

    @property
    def method(self) -> str: ...
    @property
    def amax(self) -> float: ...
    @property
    def clipping_error(self) -> float: ...
    @property
    def rounding_error(self) -> float: ...
    @property
    def sqnr_db(self) -> float: ...


def plot_calibration(
    edges: Sequence[float],
    counts: Sequence[float],
    records: Sequence[Compared],
    path: str | Path,
    *,
    title: str = "Calibration",
    caption: str = "",
) -> Path:
    """Histogram of magnitudes with a line at each method's amax, next to bars of clipping and rounding; writes a PNG.

    edges, counts  len(counts) + 1 edges from 0 up, as calibrate.linear_histogram gives them.
    records        one a method.
    Raises UnsupportedError when matplotlib is not installed or there is nothing to draw.
    """
    marks: list[_Mark] = [
        ((record.amax,), f"{record.method}: {record.amax:.4g}", {"color": LINES[i % len(LINES)]})
        for i, record in enumerate(records)
    ]
    legend = {"frameon": True, "title": "amax"}
    words = title, "|x|", "numbers in a bin", caption
    return _draw(path, (12.0, 4.8), (edges, counts), marks, legend, records, words)


class Seen(Protocol):
    """What is drawn of a tensor (ptq.calibrator.TensorHistogram)."""

    @property
    def scheme(self) -> str: ...
    @property
    def edges(self) -> Sequence[float]: ...
    @property
    def counts(self) -> Sequence[float]: ...
    @property
    def methods(self) -> Sequence[Any]: ...
    @property
    def in_use(self) -> tuple[float, float] | None: ...


def plot_tensors(histograms: Mapping[str, Seen], folder: str | Path) -> list[Path]:
    """A picture of each tensor of a model: its histogram, every method's range, the one in use, and what each costs.

    histograms  {tensor: TensorHistogram}, as returned by QuantizationCalibrator.histograms.
    folder      where one PNG is written for each tensor, named after it.
    ->          the files. Raises UnsupportedError when matplotlib is not installed or there is nothing to draw.
    """
    if not histograms:
        raise UnsupportedError("nothing to plot: the model has no static tensor whose range comes from data")
    return [plot_tensor(name, seen, Path(folder) / f"{_file_name(name)}.png") for name, seen in histograms.items()]


def plot_tensor(name: str, seen: Seen, path: str | Path) -> Path:
    """One picture of plot_tensors; `name` is its title."""
    marks: list[_Mark] = [
        (
            (record.low, record.high),
            f"{record.method}: {record.low:.4g} to {record.high:.4g}",
            {"color": LINES[i % len(LINES)]},
        )
        for i, record in enumerate(seen.methods)
    ]
    if seen.in_use is not None:
        low, high = seen.in_use
        look = {"color": "black", "linewidth": 1.4, "linestyle": (0, (2, 2))}
        marks.append(((low, high), f"in use: {low:.4g} to {high:.4g}", look))
    words = f"{name}: {sum(seen.counts):,.0f} numbers, {seen.scheme}", "value", "numbers in a bin (log scale)", ""
    return _draw(path, (13.0, 5.0), (seen.edges, seen.counts), marks, _BELOW, seen.methods, words)


def _draw(
    path: str | Path,
    size: tuple[float, float],
    bins: tuple[Sequence[float], Sequence[float]],
    marks: Sequence[_Mark],
    legend: Mapping[str, Any],
    records: Sequence[Any],
    words: tuple[str, str, str, str],
) -> Path:
    """The two panels. words: title, names of the axes, caption."""
    edges, counts = bins
    if not records or not counts:
        raise UnsupportedError("nothing to plot: no method or no data")
    figure, (left, right) = new_figure(*size, 1, 2)
    left.stairs(counts, edges, fill=True, color=GREY)
    left.set_yscale("log")
    left.set_ylim(bottom=0.5, top=max(counts) * 2)
    for ends, label, look in marks:
        for place, end in enumerate(ends, 1):
            left.axvline(end, label=label if place == len(ends) else None, **{"linewidth": 1.8, **look})
    title, x_name, y_name, caption = words
    left.set_xlabel(x_name)
    left.set_ylabel(y_name)
    left.legend(fontsize=9, **legend)
    _costs(right, records)
    without_frame(left)
    without_frame(right)
    figure.suptitle(title, fontsize=12)
    return write_file(path, saved(figure, caption))


def _costs(axis: Any, records: Sequence[Any]) -> None:
    """Bars of both errors, labelled with the SQNR."""
    places = list(range(len(records)))[::-1]
    rounding, clipping = [r.rounding_error for r in records], [r.clipping_error for r in records]
    axis.barh(places, rounding, color="#56B4E9", height=0.65, label="rounding")
    axis.barh(places, clipping, left=rounding, color="#D55E00", height=0.65, label="clipping")
    whole = [a + b for a, b in zip(rounding, clipping, strict=True)]
    for place, value, record in zip(places, whole, records, strict=True):
        axis.text(value, place, f"  {record.sqnr_db:.1f} dB", va="center", fontsize=9)
    axis.set_xlim(0, max([*whole, 1e-30]) * 1.25)
    axis.set_yticks(places, [r.method for r in records])
    axis.set_xlabel("mean squared error (SQNR beside each bar)")
    axis.legend(fontsize=9, **_BELOW)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "tensor"
