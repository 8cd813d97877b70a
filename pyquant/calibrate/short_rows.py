"""The step of the least squared error for many short rows of weights, by rounding the rows themselves.

The sorted tables that long rows are asked from (tails.py) cost a group of 128 weights more than it does to round it: a
candidate is some twenty look-ups in them, or 128 weights in a vector unit. So groups are rounded, in float32, at every
candidate, and the best are polished with what the codes themselves say: for given codes the best step is
sum(w q) / sum(q^2), which needs no finer grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pyquant import ops
from pyquant.core.scheme import TensorScheme
from pyquant.numerics.passes import at_once
from pyquant.numerics.qparams import divisor

# The constants of csrc/core/least_squares.h, whose kernel gives the bits of this file.
LONGEST: Final = 256  # numbers of a row: the tables are quicker for longer ones
FEW: Final = 64  # codes above zero: with more the error has a minimum at every other step, which tables tell apart
_AT_ONCE: Final = 1 << 17  # numbers: what the caches of one core hold
_LANES: Final = 16  # partial sums of a row
_KEPT: Final = 3  # minima of the first pass that are looked at closely
_FINE: Final = 8  # points on either side of each
_POLISHED: Final = 2  # of all these
_ROUNDS: Final = 3  # of polishing: the codes of further ones are the same


def are_rounded(scheme: TensorScheme, columns: int) -> bool:
    """Whether 'mse' rounds rows of so many weights at every candidate, instead of asking tables."""
    return scheme.symmetric and scheme.code_range[1] < FEW and columns <= LONGEST


def least_squares_steps(rows: Tensor, qmin: int, qmax: int, ratios: Tensor) -> Tensor:
    """The step s of every row with the least squared error of clamp(round(w / s), qmin, qmax) * s.

    rows    float [R, n], finite, n at least 1.
    ratios  float64 [P] on the CPU, descending from 1: the candidates, of the step that clips nothing (max |w| / qmax),
            which is never exceeded; at least 3.
    ->      float64 [R, 1]; 0 for rows of zeros. A row's step is the same in whatever company and on every device, and
            that of a row times a power of two is the step times that power, bit for bit.
    """
    if rows.device.type == "cpu" and ops.native_available():
        steps: Tensor = torch.ops.pyquant._least_squares_steps(rows.float().contiguous(), qmin, qmax, ratios)
        return steps
    return rounded_steps(rows, qmin, qmax, ratios)


def rounded_steps(rows: Tensor, qmin: int, qmax: int, ratios: Tensor) -> Tensor:
    """least_squares_steps by torch alone: what the compiled library is compared with, and what GPUs run."""
    parts = rows.split(max(1, at_once(rows.device, _AT_ONCE) // rows.shape[1]))
    width, ratios = float(1 / ratios[1]) - 1, ratios.to(rows.device)
    return torch.cat([_least(part.to(torch.float32), qmin, qmax, ratios, width) for part in parts])


def _least(rows: Tensor, qmin: int, qmax: int, ratios: Tensor, width: float) -> Tensor:
    amax = rows.abs().amax(1, keepdim=True)
    exponent = torch.frexp(amax).exponent
    half = -exponent // 2  # float32 holds 2^half and 2^(-exponent - half)
    real = rows * _power(half) * _power(-exponent - half)  # magnitudes below 1: their squares are normal numbers
    largest = torch.where(amax > 0, real.abs().amax(1, keepdim=True), 1.0).double()
    real = torch.nn.functional.pad(real, (0, -rows.shape[1] % _LANES))  # zeros have no error
    first = largest / divisor(qmax, largest)
    errors = _errors_of(real, qmin, qmax)
    steps = first * ratios
    best = steps.gather(1, _smallest(errors(steps), _KEPT))
    around = 1 + width * torch.arange(-_FINE, _FINE + 1, dtype=torch.float64, device=rows.device) / _FINE
    steps = torch.minimum((best[..., None] * around).flatten(1), first)
    best = steps.gather(1, _smallest(errors(steps), _POLISHED))
    polished = torch.cat([_polished(real, s[:, None], first, qmin, qmax) for s in best.unbind(1)], 1)
    step = polished.gather(1, _smallest(errors(polished), 1))
    return torch.where(amax > 0, step * (exponent.long() + 1023 << 52).view(torch.float64), 0.0)


def _power(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exactly: pow may miss the last bit."""
    return (exponent.int() + 127 << 23).view(torch.float32)


def _smallest(errors: Tensor, count: int) -> Tensor:
    """Where the least of a row are, in ascending order; of equal ones the first."""
    return errors.sort(dim=1, stable=True).indices[:, :count]


def _errors_of(real: Tensor, qmin: int, qmax: int) -> Callable[[Tensor], Tensor]:
    """A function: float64 steps [R, S] -> float32 [R, S], the squared error under each."""
    codes = torch.empty_like(real)

    def errors(steps: Tensor) -> Tensor:
        found = torch.empty(steps.shape[::-1], dtype=torch.float32, device=real.device)
        of_all = ((1 / steps).float(), steps.float())
        for recip, step, out in zip(*(t[..., None].unbind(1) for t in of_all), found, strict=True):
            _round(real, recip, qmin, qmax, codes)
            # multiply, then subtract: one operation could be contracted, or not, by a row's place in a vector
            off = codes.mul_(step).sub_(real)
            out.copy_(_sum(off.mul_(off))[:, 0])
        return found.T

    return errors


def _sum(t: Tensor) -> Tensor:
    """[R, multiple of _LANES] -> [R, 1], in one order on every device: numbers _LANES apart, then halves."""
    lanes, *others = t.split(_LANES, 1)
    for other in others:
        lanes = lanes + other
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, 1)
        lanes = low + high
    return lanes


def _polished(real: Tensor, step: Tensor, first: Tensor, qmin: int, qmax: int) -> Tensor:
    """The best step for the codes that a step gives, the codes of that one, and again: the error never rises."""
    codes = torch.empty_like(real)
    for _ in range(_ROUNDS):
        _round(real, (1 / step).float(), qmin, qmax, codes)
        squares, products = _sum(codes * codes).double(), _sum(codes * real).double()
        better = products / torch.where(squares > 0, squares, 1.0)
        step = torch.where((squares > 0) & (better > 0), torch.minimum(better, first), step)
    return step


def _round(real: Tensor, recip: Tensor, qmin: int, qmax: int, out: Tensor) -> None:
    torch.mul(real, recip, out=out)
    out.round_().clamp_(qmin, qmax)
