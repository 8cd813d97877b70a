"""'percentile': clips the share (100 - percentile) % of the numbers, whatever their size."""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.calibrate.registry import Range, calibrator
from pyquant.calibrate.statistics import HistogramStatistics
from pyquant.calibrate.tails import Tails
from pyquant.core.scheme import TensorScheme
from pyquant.errors import CalibrationError


@calibrator("percentile")
def percentile(statistics: HistogramStatistics, scheme: TensorScheme) -> Range:
    """Symmetric: [-a, a], a the percentile of the magnitudes. Affine: the percentiles 100 - p and p of the numbers.

    Zeros count as numbers, so data that are mostly zeros have a smaller range.
    Raises CalibrationError where that would be 0 although the data are not. Source: docs/calibration.md 2.2.

    Example:
        >>> statistics = HistogramStatistics()
        >>> statistics.observe(torch.linspace(-1, 1, 10001))
        >>> round(percentile(statistics, TensorScheme(percentile=90)).high.item(), 3)
        0.9
    """
    data = statistics.distribution()
    share = scheme.percentile / 100
    whole = data.magnitudes.count
    if scheme.symmetric:
        chosen = Range.symmetric(_quantile(data.magnitudes, share, whole, data.amax))
    else:
        high = _quantile(data.positive, share, whole, data.high)
        low = 0 - _quantile(data.negative, share, whole, -data.low)
        chosen = Range(low.to(torch.float32), high.to(torch.float32))
    if bool(((chosen.amax == 0) & (data.amax[:, 0] > 0)).any()):
        asked = f"percentile {scheme.percentile:g} of the data"
        what = f"{asked} is 0, or below 2^-20 of the largest number (nearly all are zeros, or one is far away)"
        raise CalibrationError(f"{what}; choose a larger percentile or another calibrator")
    return chosen


def _quantile(side: Tails, share: float, whole: Tensor, largest: Tensor) -> Tensor:
    """The magnitude of one side beyond which the share 1 - `share` of `whole` numbers lie; [R]."""
    beyond = whole - whole * share
    inside = torch.minimum((side.count - beyond).clamp_min(0), side.count)
    value = torch.minimum(torch.where(inside > 0, side.quantile(inside), 0.0), largest)
    return (largest if share == 1 else value)[:, 0]
