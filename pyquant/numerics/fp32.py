"""The fp32 operations that plain torch lacks, rounded once on every machine alike: fused multiply-add, square root."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def fma(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c, rounded once to float32, half to even, with subnormals.

    a, b, c  float32 tensors that broadcast, or numbers that float32 holds exactly; at least one tensor.
    NaN and infinity follow IEEE 754; the payload of a NaN is unspecified. Needs torch.set_flush_denormal to be off.
    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    product = _widen(a) * _widen(b)  # exact: 48 significant bits
    addend = _widen(c)
    total = cast(Tensor, product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)  # what rounding the sum to float64 lost, exactly
    # Rounding to odd keeps the lost part visible in the last of the 53 bits, so the rounding to 24 bits (or fewer, for
    # a subnormal) decides ties as if it saw the exact sum.
    inexact = error.abs() > 0  # false for the NaN that an infinite total leaves
    toward_zero = inexact & ((error < 0) != (total < 0))
    odd = (total.view(torch.int64) - toward_zero.long()) | inexact.long()
    return odd.view(torch.float64).to(torch.float32)


def sqrt(x: Tensor) -> Tensor:
    """The square root, rounded once to float32; torch's own may be an ulp off where a vector library computes it.

    A float64 root within an ulp of the true one rounds to the right float32: the root of a float32 stays 2^-51 of its
    size away from every midpoint of two float32.
    """
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def _widen(value: Tensor | float) -> Tensor | float:
    return value.to(torch.float64) if isinstance(value, Tensor) else value
