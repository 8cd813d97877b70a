"""Pictures of calibrations: the histogram with every method's range, and what each range costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pyquant.errors import UnsupportedError
from pyquant.io.atomic import write_file
from pyquant.report.plot import _GREY, _LINES, _figure, _png


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
    if not records or not counts:
        raise UnsupportedError("nothing to plot: no method or no data")
    figure, (left, right) = _figure(12.0, 4.8, 1, 2)
    left.stairs(counts, edges, fill=True, color=_GREY)
    left.set_yscale("log")
    left.set_ylim(bottom=0.5)
    for i, record in enumerate(records):
        label = f"{record.method}: {record.amax:.4g}"
        left.axvline(record.amax, color=_LINES[i % len(_LINES)], linewidth=1.8, label=label)
    left.set_xlabel("|x|")
    left.set_ylabel("numbers in a bin")
    left.legend(fontsize=9, frameon=True, title="amax")
    _costs(right, records)
    for axis in (left, right):
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=12)
    return write_file(path, _png(figure, caption))


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
    if not seen.methods or not seen.counts:
        raise UnsupportedError("nothing to plot: no method or no data")
    figure, (left, right) = _figure(13.0, 5.0, 1, 2)
    left.stairs(seen.counts, seen.edges, fill=True, color=_GREY)
    left.set_yscale("log")
    left.set_ylim(bottom=0.5, top=max(seen.counts) * 2)
    for i, record in enumerate(seen.methods):
        colour = _LINES[i % len(_LINES)]
        for place, end in enumerate((record.low, record.high)):
            label = f"{record.method}: {record.low:.4g} to {record.high:.4g}" if place else None
            left.axvline(end, color=colour, linewidth=1.8, label=label)
    if seen.in_use is not None:
        for place, end in enumerate(seen.in_use):
            label = f"in use: {seen.in_use[0]:.4g} to {seen.in_use[1]:.4g}" if place else None
            left.axvline(end, color="black", linewidth=1.4, linestyle=(0, (2, 2)), label=label)
    left.set_xlabel("value")
    left.set_ylabel("numbers in a bin (log scale)")
    left.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
    _costs(right, seen.methods)
    for axis in (left, right):
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"{name}: {sum(seen.counts):,.0f} numbers, {seen.scheme}", fontsize=12)
    return write_file(path, _png(figure, ""))


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
    axis.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "tensor"
