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

from pyquant.core.scheme import TensorScheme
from pyquant.numerics.passes import at_once
from pyquant.numerics.qparams import divisor

LONGEST: Final = 256  # numbers of a row: the tables are quicker for longer ones
FEW: Final = 64  # codes above zero: with more the error has a minimum at every other step, which tables tell apart
_AT_ONCE: Final = 1 << 17  # numbers: what the caches of one core hold
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
    ->      float64 [R, 1]; 0 for rows of zeros. A row's step is the same in whatever company, and that of a row times a
            power of two is the step times that power, bit for bit.
    """
    parts = rows.split(max(1, at_once(rows.device, _AT_ONCE) // rows.shape[1]))
    width, ratios = float(1 / ratios[1]) - 1, ratios.to(rows.device)
    return torch.cat([_least(part.to(torch.float32), qmin, qmax, ratios, width) for part in parts])


def _least(rows: Tensor, qmin: int, qmax: int, ratios: Tensor, width: float) -> Tensor:
    amax = rows.abs().amax(1, keepdim=True)
    exponent = torch.frexp(amax).exponent
    real = torch.ldexp(rows, -exponent)  # magnitudes in [0.5, 1): their squares are normal numbers
    largest = torch.where(amax > 0, real.abs().amax(1, keepdim=True), 1.0).double()
    first = largest / divisor(qmax, largest)
    errors = _errors_of(real, qmin, qmax)
    steps = first * ratios
    best = steps.gather(1, errors(steps).topk(_KEPT, largest=False).indices)
    around = 1 + width * torch.arange(-_FINE, _FINE + 1, dtype=torch.float64, device=rows.device) / _FINE
    steps = torch.minimum((best[..., None] * around).flatten(1), first)
    best = steps.gather(1, errors(steps).topk(_POLISHED, largest=False).indices)
    polished = torch.cat([_polished(real, s[:, None], first, qmin, qmax) for s in best.unbind(1)], 1)
    step = polished.gather(1, errors(polished).argmin(1, keepdim=True))
    return torch.where(amax > 0, torch.ldexp(step, exponent.double()), 0.0)


def _errors_of(real: Tensor, qmin: int, qmax: int) -> Callable[[Tensor], Tensor]:
    """A function: float64 steps [R, S] -> float32 [R, S], the root of the squared error under each."""
    codes = torch.empty_like(real)

    def errors(steps: Tensor) -> Tensor:
        found = torch.empty(steps.shape[::-1], dtype=torch.float32, device=real.device)
        for s, out in zip(steps.unbind(1), found, strict=True):
            _round(real, s[:, None], qmin, qmax, codes)
            # multiply, then subtract: one operation could be contracted, or not, by a row's place in a vector
            torch.linalg.vector_norm(codes.mul_(s[:, None].float()).sub_(real), dim=1, out=out)
        return found.T

    return errors


def _polished(real: Tensor, step: Tensor, first: Tensor, qmin: int, qmax: int) -> Tensor:
    """The best step for the codes that a step gives, the codes of that one, and again: the error never rises."""
    codes = torch.empty_like(real)
    for _ in range(_ROUNDS):
        _round(real, step, qmin, qmax, codes)
        squares = torch.linalg.vector_norm(codes, dim=1, keepdim=True).double().square()
        products = codes.mul_(real).sum(1, keepdim=True).double()
        better = products / torch.where(squares > 0, squares, 1.0)
        step = torch.where((squares > 0) & (better > 0), torch.minimum(better, first), step)
    return step


def _round(real: Tensor, step: Tensor, qmin: int, qmax: int, out: Tensor) -> None:
    torch.mul(real, (1 / step).float(), out=out)
    out.round_().clamp_(qmin, qmax)
