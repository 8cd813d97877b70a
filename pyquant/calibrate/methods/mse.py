"""'mse': the range whose codes are closest to the data, clipping and rounding together, by the mean squared error.

The error of a step follows from how many magnitudes, and which sum of them, lie above each rounding threshold
(docs/calibration.md 2.4): 127 look-ups for int8, which give every number of codes above zero at once, so that affine
schemes search steps only. Short rows of weights under few symmetric codes are rounded at every candidate instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyquant.calibrate.registry import Range, calibrator
from pyquant.calibrate.short_rows import LONGEST, are_rounded, least_squares_steps
from pyquant.calibrate.statistics import HistogramStatistics
from pyquant.calibrate.tails import Distribution, Tails
from pyquant.core.scheme import TensorScheme
from pyquant.numerics.qparams import divisor

PER_OCTAVE = 32  # first pass: steps 2.2 % apart
OCTAVES = 10  # down to 1/1024 of the largest at most, see lowest()
KEPT = 3  # minima of the first pass that are looked at closely
FINE = 16  # points on either side, second and third pass


@calibrator("mse")
def mse(statistics: HistogramStatistics, scheme: TensorScheme) -> Range:
    """The range with the least squared error of quantise and dequantise, within 0.01 % in the step. Affine ranges
    may end up to one step beyond the data, as zero points are whole. Source: docs/calibration.md 2.4."""
    qmin, qmax = scheme.code_range
    rows = statistics.short_rows(LONGEST)
    if rows is not None and are_rounded(scheme, rows.shape[1]):
        ratios = _ratios(lowest(qmax, math.sqrt(rows.shape[1]) / 2), torch.device("cpu"))
        step = least_squares_steps(rows, qmin, qmax, ratios)
        return Range.symmetric(torch.minimum(step[:, 0] * qmax, statistics.amax().double()))
    data = statistics.distribution()
    span, count = qmax - qmin, float(data.magnitudes.count[0])
    alive = data.amax > 0
    if scheme.symmetric:
        first = torch.where(alive, data.amax / divisor(qmax, data.amax), 1.0)
        bound = lowest(qmax, math.sqrt(count) / 2)
        step = least(lambda steps: _symmetric_error(data, steps, qmin, qmax), first, bound)
        amax = torch.minimum(step * qmax, data.amax)
        return Range.symmetric(torch.where(alive, amax, 0.0)[:, 0])
    first = torch.where(alive, (data.high - data.low) / divisor(span - 1, data.low), 1.0)
    bound = lowest(span, 1 + math.sqrt(count / 2))
    step = least(lambda steps: _affine_errors(data, steps, span).amin(-1), first, bound)
    below = _affine_errors(data, step, span).argmin(-1)  # codes below zero
    low, high = 0 - step * below, step * (span - below)
    return Range(*(torch.where(alive, end, 0.0)[:, 0].to(torch.float32) for end in (low, high)))


def lowest(codes: int, codes_lost: float) -> float:
    """Smallest step, over the largest, at which the optimum can be: clipping the largest number alone by k steps
    costs k^2 of their squares, so no more than `codes_lost` can be given up (docs/calibration.md 2.4)."""
    return max(1 - codes_lost / codes, 2.0**-OCTAVES)


def least(error: Callable[[Tensor], Tensor], first: Tensor, bound: float) -> Tensor:
    """The step in [bound * first, first] with the least error, coarse to fine; float64 [R, 1]. error: float64 [R, n]
    steps -> [R, n] errors. first: float64 [R, 1], the largest step."""
    steps = first * _ratios(bound, first.device)
    errors = error(steps)
    minima = errors.topk(KEPT, largest=False).indices
    best = steps.gather(-1, minima)
    width = 2 ** (1 / PER_OCTAVE) - 1
    around = torch.arange(-FINE, FINE + 1, dtype=torch.float64, device=first.device) / FINE
    for _ in range(2):
        steps = torch.minimum((best[..., None] * (1 + width * around)).flatten(-2), first)
        best = steps.gather(-1, error(steps).argmin(-1, keepdim=True))
        width /= FINE
    return best


def _ratios(bound: float, device: torch.device) -> Tensor:
    """The candidates of the first pass, of the largest step: from 1 down to the bound."""
    points = max(math.ceil(-PER_OCTAVE * math.log2(bound)) + 1, KEPT)
    return torch.exp2(-torch.arange(points, dtype=torch.float64, device=device) / PER_OCTAVE)


def side_errors(side: Tails, steps: Tensor, codes: int) -> Tensor:
    """Squared error of one sign's magnitudes under n = 0 .. codes codes above zero; [R, S] -> [R, S, codes + 1]."""
    q = torch.arange(1, codes + 1, dtype=torch.float64, device=steps.device)
    thresholds = steps[..., None] * (q - 0.5)
    count, total = (a.view(thresholds.shape) for a in side.above(thresholds.flatten(-2)))
    s = steps[..., None]
    gained = (s * s) * (count * (2 * q - 1)).cumsum(-1) - (2 * s) * total.cumsum(-1)
    return side.square[..., None] + torch.cat([torch.zeros_like(s), gained], -1)


def _symmetric_error(data: Distribution, steps: Tensor, qmin: int, qmax: int) -> Tensor:
    if -qmin == qmax:
        return side_errors(data.magnitudes, steps, qmax)[..., -1]
    return side_errors(data.positive, steps, qmax)[..., -1] + side_errors(data.negative, steps, -qmin)[..., -1]


def _affine_errors(data: Distribution, steps: Tensor, span: int) -> Tensor:
    """[R, S, span + 1]: the error with that many codes below zero, the others above."""
    return side_errors(data.negative, steps, span) + side_errors(data.positive, steps, span).flip(-1)
