"""'max': the range of everything that was seen. No number is clipped; outliers widen the step of all."""

from __future__ import annotations

from pyquant.calibrate.registry import Range, calibrator
from pyquant.calibrate.statistics import RangeStatistics
from pyquant.core.scheme import TensorScheme


@calibrator("max", statistics=RangeStatistics)
def absmax(statistics: RangeStatistics, scheme: TensorScheme) -> Range:
    """[-amax, amax], or [min(low, 0), max(high, 0)] of affine schemes. Source: docs/calibration.md 2.1."""
    if scheme.symmetric:
        return Range.symmetric(statistics.amax())
    low, high = statistics.range()
    return Range(low.clamp_max(0), high.clamp_min(0))
