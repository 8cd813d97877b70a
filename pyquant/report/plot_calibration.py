"""The picture of a calibration: the histogram with every method's amax, and what each range costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pyquant.errors import UnsupportedError
from pyquant.report.plot import _GREY, _LINES, _figure, _save


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
    """Histogram of magnitudes with a line at each method's amax, beside bars of clipping and rounding; writes a PNG.

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
    places = list(range(len(records)))[::-1]
    rounding = [r.rounding_error for r in records]
    right.barh(places, rounding, color="#56B4E9", height=0.65, label="rounding")
    clipping = [r.clipping_error for r in records]
    right.barh(places, clipping, left=rounding, color="#D55E00", height=0.65, label="clipping")
    whole = [r.rounding_error + r.clipping_error for r in records]
    for place, value, record in zip(places, whole, records, strict=True):
        right.text(value, place, f"  {record.sqnr_db:.1f} dB", va="center", fontsize=9)
    right.set_xlim(0, max([*whole, 1e-30]) * 1.25)
    right.set_yticks(places, [r.method for r in records])
    right.set_xlabel("mean squared error")
    right.legend(fontsize=9, frameon=False)
    for axis in (left, right):
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=12)
    return _save(figure, path, caption)
