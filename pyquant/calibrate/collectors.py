"""The calibrators under the names that the tutorials use: collect(x) for every batch, then compute_amax()."""

from __future__ import annotations

import math
from typing import Literal

import torch

from pyquant.calibrate.first_batch import FirstBatchHistogram
from pyquant.calibrate.registry import compute_range
from pyquant.calibrate.statistics import HistogramStatistics, RangeStatistics
from pyquant.core import arguments
from pyquant.core.scheme import TensorScheme


class MaxCalibrator:
    """Largest absolute value.

    channel_axis  None: of the whole tensor; otherwise one for each index of that axis.

    Example:
        >>> calibrator = MaxCalibrator()
        >>> calibrator.collect(torch.tensor([1.0, -3.0]))
        >>> calibrator.compute_amax().item()
        3.0
    """

    def __init__(self, channel_axis: int | None = None) -> None:
        self.statistics: RangeStatistics = RangeStatistics(channel_axis)

    def collect(self, x: torch.Tensor) -> None:
        """Takes in one batch, float32, float16 or bfloat16 of any shape. NonFiniteError for NaN or infinity."""
        self.statistics.observe(x)

    def compute_amax(self) -> torch.Tensor:
        """float32 [] (or [C]) on the device of the data. Raises CalibrationError before any data."""
        return self.statistics.amax()


class HistogramCollector(MaxCalibrator):
    """A histogram that every method can be asked about.

    method, bits, percentile  what compute_amax takes where it is told nothing: 'max', 8 and 99.99 here; the
                              calibrators below have a method of their own, and the bits or percentile of their start.

    Example:
        >>> collector = HistogramCollector()
        >>> collector.collect(torch.linspace(-1, 1, 10001))
        >>> round(collector.compute_amax("percentile", percentile=50).item(), 3)
        0.5
    """

    method, bits, percentile = "max", 8, 99.99

    def __init__(self, channel_axis: int | None = None) -> None:
        super().__init__(channel_axis)
        self.statistics: RangeStatistics = HistogramStatistics(channel_axis)

    def compute_amax(
        self, method: str | None = None, *, bits: int | None = None, percentile: float | None = None
    ) -> torch.Tensor:
        """What a method makes of the data, float32 [] (or [C]).

        method  'max', 'percentile', 'entropy' or 'mse'; bits (8 or 4) matters to the last two.
        """
        bits = self.bits if bits is None else bits
        percentile = self.percentile if percentile is None else percentile
        method = self.method if method is None else method
        return self._amax(TensorScheme(bits=bits, calibrator=method, percentile=percentile))

    def _amax(self, scheme: TensorScheme) -> torch.Tensor:
        return compute_range(self.statistics, scheme).amax


class PercentileCalibrator(HistogramCollector):
    """The percentile of the absolute values.

    Example:
        >>> calibrator = PercentileCalibrator(percentile=90)
        >>> calibrator.collect(torch.linspace(-1, 1, 10001))
        >>> round(calibrator.compute_amax().item(), 3)
        0.9
    """

    method = "percentile"

    def __init__(self, percentile: float = 99.99, channel_axis: int | None = None) -> None:
        super().__init__(channel_axis)
        self.percentile = percentile


class MSECalibrator(HistogramCollector):
    """The range with the least mean squared error.

    Example:
        >>> calibrator = MSECalibrator(bits=4)
        >>> calibrator.collect(torch.linspace(-1, 1, 10001))
        >>> 0.5 < calibrator.compute_amax().item() <= 1
        True
    """

    method = "mse"

    def __init__(self, bits: int = 8, channel_axis: int | None = None) -> None:
        super().__init__(channel_axis)
        self.bits = bits


class EntropyCalibrator(HistogramCollector):
    """The range with the least KL divergence.

    grid  'first_batch': 2048 equal bins of the first batch's range, and more above, as in the tools of the tutorials,
          whose ranges these are; the order of the batches matters. 'data': as the registered method 'entropy', for
          which it does not.
    Raises ArgumentError for another grid; collect() CalibrationError where a later batch is over 32 times as large as
    the first one ('first_batch' only). Source: docs/calibration.md 2.3.

    Example:
        >>> calibrator = EntropyCalibrator(bits=4)
        >>> calibrator.collect(torch.linspace(-1, 1, 10001))
        >>> 0.5 < calibrator.compute_amax().item() <= 1
        True
    """

    method = "entropy"

    def __init__(
        self, bits: int = 8, channel_axis: int | None = None, grid: Literal["first_batch", "data"] = "first_batch"
    ) -> None:
        super().__init__(channel_axis)
        arguments.one_of("grid", grid, ("first_batch", "data"))
        self.bits, self.grid = bits, grid
        self._histograms: list[FirstBatchHistogram] = []

    def collect(self, x: torch.Tensor) -> None:
        """As MaxCalibrator.collect."""
        rows = self.statistics.rows(x)
        if self.grid == "data" or rows.numel() == 0:
            super().collect(x)
            return
        # Whatever refuses the batch refuses it before anything remembers it.
        for histogram, largest in zip(self._histograms, rows.abs().amax(1).tolist(), strict=False):
            if math.isfinite(largest):
                histogram.reach(largest)
        super().collect(x)
        self._histograms = self._histograms or [FirstBatchHistogram() for _ in rows]
        for histogram, row in zip(self._histograms, rows, strict=True):
            histogram.observe(row)

    def _amax(self, scheme: TensorScheme) -> torch.Tensor:
        if scheme.calibrator != "entropy" or not self._histograms:
            return super()._amax(scheme)
        amax = torch.stack([histogram.entropy_amax(scheme.bits) for histogram in self._histograms])
        return amax.reshape(self.statistics.amax().shape).minimum(self.statistics.amax())
