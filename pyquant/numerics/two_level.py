"""Group scales of two levels: whole steps of one float scale a channel (docs/numerics.md 4.1).

Steps go into the codes, and what is left is a product of int8 codes with one scale a channel: one integer sum runs over
all of K. Sources: Dai et al., "VS-Quant: Per-vector Scaled Quantization for Accurate Low-Precision Neural Network
Inference", arXiv 2102.04503 (integer scales of vectors under a float scale of a channel); Lin et al., "QServe: W4A8KV4
Quantization and System Co-design for Efficient LLM Serving", arXiv 2405.04532 (progressive group quantisation: 4-bit
codes times an integer group scale are int8 codes, protected from overflow).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pyquant.core.dtypes import INT8
from pyquant.numerics.passes import at_once

BASE_BITS: Final = 17  # significant bits of a base: base * step has at most 24, so that float32 holds it exactly
_MASK: Final = -1 << 24 - BASE_BITS
_ZERO: Final = 2.0**-100  # below it a range counts as zero (docs/numerics.md 2.1)
# What two_level_scales tries: the largest scale of a channel, and how many steps less than cover the group.
_SHRUNK: Final = (1.0, 0.95, 0.9, 0.85, 0.8)
_FEWER: Final = 5
_CHUNK: Final = 1 << 18  # weights searched at once, which stay in a cache


def largest_step(qmin: int, qmax: int) -> int:
    """The largest step whose products with codes in [qmin, qmax] all lie in [-127, 127].

    Example:
        >>> largest_step(-7, 7), largest_step(-8, 7)
        (18, 15)
    """
    return INT8.qmax // max(-qmin, qmax)


def whole_base(base: Tensor) -> Tensor:
    """float32 rounded to BASE_BITS significant bits, halves up; > 0 and normal.

    Example:
        >>> whole_base(torch.tensor([1.0, 1.0 + 2**-20])).tolist()
        [1.0, 1.0]
    """
    bits = base.to(torch.float32).contiguous().view(torch.int32)
    return ((bits - (_MASK >> 1)) & _MASK).view(torch.float32)


def split_scales(scale: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """The two levels of group scales.

    scale    float32 [N, K / group_size], > 0.     largest   as largest_step.
    ->       base float32 [N], the largest number of which all scales of the row are exact multiples by 1 to `largest`,
             NaN where there is none (1 where a row has no scales); step int8 [N, K / group_size].
    Source: docs/numerics.md 4.1.

    Example:
        >>> base, step = split_scales(torch.tensor([[0.5, 0.75, 1.0]]), 18)
        >>> base.tolist(), step.tolist()
        ([0.25], [[2, 3, 4]])
    """
    rows = scale.to(torch.float64)
    if rows.shape[1] == 0:
        return torch.ones_like(scale[:, :0].sum(1)), torch.zeros_like(scale, dtype=torch.int8)
    low = rows.amin(1)
    base = torch.full_like(low, torch.nan)
    for count in range(largest, 0, -1):  # the fewest steps of the smallest scale come last and stay
        tried = (low / count).to(torch.float32).to(torch.float64)
        steps = torch.round(rows / tried[:, None])
        fits = (steps * tried[:, None] == rows).all(1) & (steps <= largest).all(1)
        base = torch.where(fits, tried, base)
    step = torch.round(rows / base[:, None]).nan_to_num(0.0).to(torch.int8)
    return base.to(torch.float32), step


def one_level(codes: Tensor, scale: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """What the product multiplies: int8 [N, K], codes times steps, and its scale float32 [N].

    codes   int8 [N, K].     scale, largest   as split_scales; the rows have a base.

    Example:
        >>> products, base = one_level(torch.tensor([[7, -7]], dtype=torch.int8), torch.tensor([[9.0, 1.0]]), 18)
        >>> products.tolist(), base.tolist()
        ([[63, -7]], [1.0])
    """
    base, step = split_scales(scale, largest)
    return codes * _spread(step, codes), base


def codes_of_products(products: Tensor, scale: Tensor, largest: int) -> Tensor:
    """The codes that one_level multiplied, int8 [N, K]."""
    step = _spread(split_scales(scale, largest)[1], products)
    return torch.div(products, step, rounding_mode="trunc")


def two_level_scales(weight: Tensor, target: Tensor, qmin: int, qmax: int) -> Tensor:
    """Group scales of two levels for a weight matrix, near wanted ones, by the squared error of the weights.

    weight   float32 [N, K], finite.
    target   float32 [N, K / group_size], > 0: scales that cover each group's range.
    ->       float32, shape of target: base * step of each row. For every base of a few below the largest target, each
             group takes the step of least error among those that just cover it and up to four less; the base of least
             error of the row wins, the larger one of equals.
    Source: docs/numerics.md 4.1.

    Example:
        >>> two_level_scales(torch.tensor([[7.0, 3.0, 0.5, 1.0]]), torch.tensor([[1.0, 1.0 / 7]]), -7, 7).shape
        torch.Size([1, 2])
    """
    if target.numel() == 0:
        return target
    groups = weight.reshape(*target.shape, -1)
    per_chunk = max(1, at_once(weight.device, _CHUNK) // max(weight.shape[1], 1))
    pairs = zip(groups.split(per_chunk), target.split(per_chunk), strict=True)
    return torch.cat([_searched(rows, wanted, qmin, qmax) for rows, wanted in pairs])


def _searched(rows: Tensor, target: Tensor, qmin: int, qmax: int) -> Tensor:
    """two_level_scales of some rows [R, G, group_size]."""
    largest = largest_step(qmin, qmax)
    wanted = torch.where(rows.abs().amax(-1) < _ZERO, 0.0, target)  # a group of zeros is exact under any scale
    top = wanted.amax(1)
    top = torch.where(top > 0, top, float(largest))
    best = torch.empty_like(target)
    least = torch.full_like(top, torch.inf, dtype=torch.float64)
    for share in _SHRUNK:
        base = whole_base(top * share / largest)
        cover = torch.ceil(wanted / base[:, None])
        scale, error = torch.empty_like(target), torch.full_like(target, torch.inf)
        for fewer in range(_FEWER):
            tried = (cover - fewer).clamp(1, largest) * base[:, None]
            one = _squared_error(rows, tried[..., None], qmin, qmax)
            scale, error = torch.where(one < error, tried, scale), torch.minimum(error, one)
        of_row = error.to(torch.float64).sum(1)
        best = torch.where((of_row < least)[:, None], scale, best)
        least = torch.minimum(least, of_row)
    return best


def _squared_error(rows: Tensor, scale: Tensor, qmin: int, qmax: int) -> Tensor:
    codes = (rows * (1 / scale)).round_().clamp_(qmin, qmax)
    return codes.mul_(scale).sub_(rows).square_().sum(-1)


def _spread(step: Tensor, codes: Tensor) -> Tensor:
    """A step for every code."""
    return step.repeat_interleave(codes.shape[1] // max(step.shape[1], 1), 1, output_size=codes.shape[1])
