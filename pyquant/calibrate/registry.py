"""The calibration methods by name, and the one way from statistics to a range and to scale and zero point.

The contract of a method, executed for every registered one by tests/calibrate/test_contract.py: the order of batches
does not matter, merged halves equal the whole, data scaled by a power of two scales the result exactly, all-zero data
gives 0, the result is at most the true amax, and lives as float32 on the device of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyquant import numerics
from pyquant.calibrate.statistics import HistogramStatistics, RangeStatistics
from pyquant.core.registry import CALIBRATORS
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, CalibrationError, SchemeError


class Range(NamedTuple):
    """The real numbers that codes shall cover: float32 tensors of equal shape, low <= 0 <= high.

    Of symmetric schemes low = -high.

    Example:
        >>> Range(torch.tensor(-1.0), torch.tensor(3.0)).amax.item()
        3.0
    """

    low: Tensor
    high: Tensor

    @property
    def amax(self) -> Tensor:
        """The larger end, float32."""
        return torch.maximum(-self.low, self.high)

    @staticmethod
    def symmetric(amax: Tensor) -> Range:
        """[-amax, amax] of a float tensor of any type, as float32."""
        amax = amax.to(torch.float32)
        return Range(-amax, amax)


RangeFunction = Callable[..., Range]


@dataclass(frozen=True)
class Method:
    """A registered calibration method: its name, as TensorScheme.calibrator spells it; its function (statistics,
    scheme) -> Range, which of HistogramStatistics sees one channel at a time; and the kind of statistics that it
    needs."""

    name: str
    function: RangeFunction
    statistics: type[RangeStatistics]


def calibrator(
    name: str, statistics: type[RangeStatistics] = HistogramStatistics
) -> Callable[[RangeFunction], RangeFunction]:
    """Registers a function (statistics, TensorScheme) -> Range as calibration method `name`.

    Raises ArgumentError for a name that is taken.

    Example:
        >>> calibrator("max")
        Traceback (most recent call last):
        ...
        pyquant.errors.ArgumentError: argument 'name': got 'max'; allowed: a name that is not taken: max, ...
    """
    return CALIBRATORS.register(name, lambda function: Method(name, function, statistics))


def methods() -> tuple[Method, ...]:
    """Every registered method, in order of registration.

    Example:
        >>> [method.name for method in methods()]
        ['max', 'entropy', 'fixed', 'mse', 'percentile']
    """
    return tuple(map(CALIBRATORS.find, CALIBRATORS))


def new_statistics(scheme: TensorScheme, channel_axis: int | None = None) -> RangeStatistics:
    """Empty statistics of the kind that the scheme's calibrator needs.

    Example:
        >>> new_statistics(TensorScheme(calibrator="mse"))
        HistogramStatistics(count=0)
    """
    statistics: type[RangeStatistics] = CALIBRATORS.find(scheme.calibrator).statistics
    return statistics(channel_axis)


def compute_range(statistics: RangeStatistics, scheme: TensorScheme) -> Range:
    """The range that the scheme's calibrator takes from statistics.

    statistics  of the kind that the method needs (new_statistics) or richer, with data.
    ->          Range, float32 [] or [C] on the device of the data.
    Raises CalibrationError where there was no data, ArgumentError for statistics of the wrong kind.
    Source: docs/calibration.md 2.

    Example:
        >>> statistics = new_statistics(TensorScheme())
        >>> statistics.observe(torch.tensor([1.0, -3.0]))
        >>> compute_range(statistics, TensorScheme()).amax.item()
        3.0
    """
    method: Method = CALIBRATORS.find(scheme.calibrator)
    if not isinstance(statistics, method.statistics):
        raise ArgumentError("statistics", repr(statistics), f"{method.statistics.__name__} for '{method.name}'")
    if scheme.bits > 8 and method.name == "entropy":
        raise SchemeError("bits", scheme.bits, "up to 8 with 'entropy', whose bins are fewer than int16 codes")
    if statistics.count == 0:
        raise CalibrationError(f"calibrator '{method.name}': these statistics have seen no data")
    if method.statistics is HistogramStatistics and isinstance(statistics, HistogramStatistics):
        ranges = [method.function(channel, scheme) for channel in statistics.channels()]
        joined = Range(*(torch.cat([r[end].reshape(-1) for r in ranges]) for end in (0, 1)))
        return Range(joined.low[0], joined.high[0]) if statistics.channel_axis is None else joined
    return method.function(statistics, scheme)


def range_to_qparams(chosen: Range, scheme: TensorScheme) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a range.

    chosen  Range, any shape.
    ->      scale float32 and zero point int32 (zeros of symmetric schemes) of that shape.
    Source: docs/numerics.md 2.1.

    Example:
        >>> scale, zero_point = range_to_qparams(Range.symmetric(torch.tensor(254.0)), TensorScheme())
        >>> scale.item(), zero_point.item()
        (2.0, 0)
    """
    qmin, qmax = scheme.code_range
    if scheme.symmetric:
        scale = numerics.scale_from_amax(chosen.amax, qmax)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    return numerics.qparams_from_range(chosen.low, chosen.high, qmin, qmax)
