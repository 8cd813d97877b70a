"""'fixed': a range that the user knows, such as [-1, 1] of a tanh. No data is needed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyquant.calibrate.methods.absmax import absmax
from pyquant.calibrate.registry import Range, calibrator
from pyquant.calibrate.statistics import RangeStatistics
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError


class GivenRange(RangeStatistics):
    """A range that no data changes, in the place of statistics.

    amax       the range is [-amax, amax], or
    low, high  [low, high], finite, low <= high.

    Raises ArgumentError. Source: docs/calibration.md 2.5.

    Example:
        >>> given = GivenRange.of(amax=1.0)
        >>> given.observe(torch.tensor([5.0]))
        >>> given.amax().item()
        1.0
    """

    @staticmethod
    def of(amax: float | None = None, *, low: float | None = None, high: float | None = None) -> GivenRange:
        """A given range; see the class."""
        if (amax is None) == (low is None or high is None):
            raise ArgumentError("amax", amax, "either amax, or both low and high")
        ends = (-amax, amax) if amax is not None else (low, high)
        if not all(isinstance(e, int | float) and math.isfinite(e) for e in ends) or ends[0] > ends[1]:  # type: ignore[operator,arg-type]
            raise ArgumentError("amax" if amax is not None else "low", ends, "finite numbers, low <= high")
        given = GivenRange()
        given.low, given.high = (torch.tensor(e, dtype=torch.float32, device="cpu") for e in ends)
        given.count = 1  # so that it counts as calibrated
        return given

    def observe(self, x: Tensor) -> None:
        """Changes nothing but the device."""
        self.to(x.device)

    def merge(self, other: RangeStatistics) -> None:
        """Changes nothing."""

    def reduce_(self, process_group: object = None) -> None:
        """Changes nothing."""


@calibrator("fixed", statistics=GivenRange)
def fixed(statistics: GivenRange, scheme: TensorScheme) -> Range:
    """The given range, widened to contain 0; symmetric schemes: its larger end on both sides. Source:
    docs/calibration.md 2.5."""
    return absmax(statistics, scheme)
