"""Every calibration method on the same statistics, with what each costs: clipping and rounding apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pyquant.calibrate.methods.mse import side_errors
from pyquant.calibrate.registry import compute_range, methods, range_to_qparams
from pyquant.calibrate.statistics import HistogramStatistics
from pyquant.calibrate.tails import Tails
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError


@dataclass(frozen=True)
class Comparison:
    """What one method makes of the data.

    method          its name; the percentile stands in brackets.
    low, high       the chosen range; amax the larger end.
    clipping_error  mean squared error of the numbers beyond the range.
    rounding_error  mean squared error of the others, and of the clipped ones' codes.
    sqnr_db         signal over both errors; infinite where there is none.
    """

    method: str
    low: float
    high: float
    clipping_error: float
    rounding_error: float
    sqnr_db: float

    @property
    def amax(self) -> float:
        """The larger end."""
        return max(-self.low, self.high)


def histogram_methods() -> tuple[str, ...]:
    """The methods that a histogram serves, which are all that look at the data.

    Example:
        >>> histogram_methods()
        ('max', 'entropy', 'mse', 'percentile')
    """
    return tuple(m.name for m in methods() if issubclass(HistogramStatistics, m.statistics))


def compare(
    statistics: HistogramStatistics, scheme: TensorScheme, names: Sequence[str] | None = None
) -> list[Comparison]:
    """Range and errors of every method under one scheme.

    statistics  of a whole tensor, with data.
    scheme      bits, symmetric, narrow_range, percentile; its own calibrator does not matter.
    names       methods; default: all that look at the data.
    ->          one record a method, in the order of names.

    Raises ArgumentError for unknown names or statistics per channel, CalibrationError where there was no data.
    Source: docs/calibration.md 5.

    Example:
        >>> statistics = HistogramStatistics()
        >>> statistics.observe(torch.randn(65536, generator=torch.Generator().manual_seed(0)))
        >>> best = max(compare(statistics, TensorScheme(bits=4)), key=lambda record: record.sqnr_db)
        >>> best.method, best.clipping_error < best.rounding_error
        ('mse', True)
    """
    if not isinstance(statistics, HistogramStatistics) or statistics.channel_axis is not None:
        raise ArgumentError("statistics", repr(statistics), "HistogramStatistics of a whole tensor")
    methods = histogram_methods() if names is None else names
    return [_record(statistics, replace(scheme, calibrator=name)) for name in methods]


def _record(statistics: HistogramStatistics, scheme: TensorScheme) -> Comparison:
    chosen = compute_range(statistics, scheme)
    scale, zero_point = range_to_qparams(chosen, scheme)
    qmin, qmax = scheme.code_range
    data, step = statistics.distribution(), float(scale)
    above, below = qmax - int(zero_point), int(zero_point) - qmin
    total = clipped = 0.0
    for side, codes in ((data.positive, above), (data.negative, below)):
        total += float(side_errors(side, scale.to(torch.float64).reshape(1, 1), codes)[..., -1])
        clipped += _clipping(side, step * codes)
    n, signal = float(data.magnitudes.count), float(data.magnitudes.square)
    total = max(total, clipped)  # float64 cancellation, where there is no error
    sqnr = math.inf if total <= signal * 1e-15 else 10 * math.log10(signal / total)
    name = f"percentile({scheme.percentile:g})" if scheme.calibrator == "percentile" else scheme.calibrator
    return Comparison(name, float(chosen.low), float(chosen.high), clipped / n, (total - clipped) / n, sqnr)


def _clipping(side: Tails, end: float) -> float:
    """Sum of (x - end)^2 over the magnitudes beyond `end`."""
    at = side.count.new_full((1, 1), end)
    count, total = side.above(at)
    return max(float(side.square_above(at) - 2 * end * total + end * end * count), 0.0)


def signed_histogram(statistics: HistogramStatistics, bins: int = 200) -> tuple[list[float], list[float]]:
    """The numbers in equal bins from the smallest to the largest, for pictures; the range contains 0.

    ->  (bins + 1 edges, how many numbers are in each bin; the zeros are in the bin of 0).

    Example:
        >>> statistics = HistogramStatistics()
        >>> statistics.observe(torch.tensor([-2.0, 0.0, 1.0, 1.9]))
        >>> signed_histogram(statistics, 4)
        ([-2.0, -1.025..., -0.05..., 0.924..., 1.899...], [1.0, 0.0, 1.0, 2.0])
    """
    data = statistics.distribution()
    low, high = float(data.low), float(data.high)
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64, device=data.high.device)
    zero = torch.zeros(1, 1, dtype=torch.float64, device=edges.device)
    right, left = (side.above(zero)[0][0] for side in (data.positive, data.negative))
    zeros = data.magnitudes.count[0] - right - left
    # how many numbers exceed each edge; for a negative edge all but those at or below it
    above = data.positive.above(edges.clamp_min(0)[None])[0][0]
    lower = data.negative.above((-edges).clamp_min(0)[None])[0][0]
    above = torch.where(edges < 0, right + zeros + left - lower, above)
    above[0], above[-1] = data.magnitudes.count[0], 0.0
    return edges.tolist(), (above[:-1] - above[1:]).clamp_min(0).tolist()


def linear_histogram(statistics: HistogramStatistics, bins: int = 200) -> tuple[list[float], list[float]]:
    """The magnitudes in equal bins from 0 to the largest, for pictures.

    ->  (bins + 1 edges, the number of magnitudes in each bin; the zeros are in the first).

    Example:
        >>> statistics = HistogramStatistics()
        >>> statistics.observe(torch.tensor([1.0, -3.9, 4.0]))
        >>> linear_histogram(statistics, 4)
        ([0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 2.0])
    """
    data = statistics.distribution()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=data.high.device) * data.amax[0]
    above = torch.cat([data.magnitudes.count[0], data.magnitudes.above(edges[None, 1:])[0][0]])
    return edges.tolist(), (above[:-1] - above[1:]).tolist()
