"""Histograms of magnitudes over floating bins (docs/numerics.md 14): the specification of `magnitude_histogram`.

A bin is an exponent and the first MANTISSA_BITS bits of the fraction, so a bin is at most 2^-10 of what it holds, at
any magnitude, and multiplying the data by a power of two moves whole octaves. The window is the OCTAVES octaves below
2^exponent; what is smaller shares bin 0 with the zeros. A larger exponent only turns whole octaves into bin 0, so the
histogram of many batches does not depend on their order.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

MANTISSA_BITS: Final = 10
OCTAVES: Final = 20
BINS: Final = (OCTAVES << MANTISSA_BITS) + 1
EXPONENT_MIN: Final = -100  # below it a range counts as zero (AMAX_FLOOR), and the whole window is of normal numbers
EXPONENT_MAX: Final = 128  # 2^128 covers every finite float32
_DROPPED_BITS: Final = 23 - MANTISSA_BITS
_BIAS: Final = 127


def magnitude_exponent(amax: float) -> int:
    """Smallest exponent in [EXPONENT_MIN, EXPONENT_MAX] with amax < 2^exponent, for a finite amax >= 0 in real units.

    Example:
        >>> magnitude_exponent(0.75), magnitude_exponent(1.0), magnitude_exponent(0.0)
        (0, 1, -100)
    """
    return min(max(math.frexp(amax)[1], EXPONENT_MIN), EXPONENT_MAX) if amax > 0 else EXPONENT_MIN


def magnitude_histogram(x: Tensor, exponent: int) -> Tensor:
    """Counts of |x| per floating bin of the window [2^(exponent - OCTAVES), 2^exponent), negative numbers apart.

    Example:
        >>> counts = magnitude_histogram(torch.tensor([0.0, 1.5, -1.5, 1.5]), 1)
        >>> counts.sum(1).tolist(), counts[:, 20 * 1024 - 511].tolist()
        ([1, 3], [1, 2])
    """
    patterns = x.detach().to(torch.float32).reshape(-1).view(torch.int32)
    bins = ((patterns & 0x7FFFFFFF) >> _DROPPED_BITS) - (first_key(exponent) - 1)
    bins = bins.clamp_(0, BINS - 1) + (patterns >= 0).to(torch.int32) * BINS
    return torch.bincount(bins, minlength=2 * BINS).reshape(2, BINS)


def first_key(exponent: int) -> int:
    """Exponent and fraction bits of the smallest number in the window, 2^(exponent - OCTAVES), as one integer."""
    return (exponent - OCTAVES + _BIAS) << MANTISSA_BITS


def magnitude_edges(exponent: int) -> Tensor:
    """The edges of the bins, exact, float64 [BINS + 1] on the CPU: 0, then 2^(exponent - OCTAVES) to 2^exponent.

    Bin i holds edges[i] <= |x| < edges[i + 1].
    """
    steps = 1 << MANTISSA_BITS
    octaves = torch.exp2(torch.arange(exponent - OCTAVES, exponent, dtype=torch.float64, device="cpu"))
    fractions = torch.arange(steps, 2 * steps, dtype=torch.float64, device="cpu") / steps
    end = torch.tensor([2.0**exponent], dtype=torch.float64, device="cpu")
    return torch.cat([end.new_zeros(1), (octaves[:, None] * fractions).reshape(-1), end])


def widen_histogram(counts: Tensor, octaves: int) -> Tensor:
    """The same counts [..., BINS] in a window that ends `octaves` (>= 0) higher: what falls below it joins bin 0."""
    lost = min(octaves, OCTAVES) << MANTISSA_BITS
    wide = torch.zeros_like(counts)
    wide[..., 0] = counts[..., : lost + 1].sum(-1)
    wide[..., 1 : BINS - lost] = counts[..., lost + 1 :]
    return wide
