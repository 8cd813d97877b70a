"""Ranges -> scales and zero points (docs/numerics.md 2.1)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

AMAX_FLOOR: Final = 2.0**-100  # below it a range counts as zero: its reciprocal would leave float32


def as_float32(value: float, like: Tensor) -> Tensor:
    """A number as a 0-dim float32 tensor on the device of `like` (see the package docstring for why not a number)."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def divisor(value: float, like: Tensor) -> Tensor:
    """A number to divide `like` by: 0-dim, of its dtype, on its device.

    CUDA multiplies by the reciprocal where the divisor is a Python number, which rounds twice.
    """
    return torch.full((), value, dtype=like.dtype, device=like.device)


def scale_from_amax(amax: Tensor, qmax: int) -> Tensor:
    """Symmetric scale of a largest absolute value.

    amax  float32, any shape, real units, >= 0.
    qmax  largest code.
    ->    float32, same shape: amax / qmax, one IEEE division; 1 where amax < 2^-100; NaN where amax is NaN or infinite.
    Source: docs/numerics.md 2.1.

    Example:
        >>> scale_from_amax(torch.tensor([254.0, 0.0]), 127).tolist()
        [2.0, 1.0]
    """
    scale = amax / as_float32(qmax, amax)
    scale = torch.where(amax < AMAX_FLOOR, as_float32(1.0, amax), scale)
    return torch.where(amax < torch.inf, scale, as_float32(torch.nan, amax))


def qparams_from_range(low: Tensor, high: Tensor, qmin: int, qmax: int) -> tuple[Tensor, Tensor]:
    """Affine scale and zero point of a range, widened to contain zero.

    low, high  float32, same shape, real units.
    ->         scale float32: high / steps - low / steps (three roundings, so no finite range overflows), steps =
               qmax - qmin; 1 where the range is below 2^-100; NaN where an end is NaN or infinite.
               zero_point int32 in [qmin, qmax]: qmin - rint(low * (1 / scale)); 0 where the scale is NaN.
    Source: docs/numerics.md 2.1.

    Example:
        >>> scale, zero_point = qparams_from_range(torch.tensor([-1.0]), torch.tensor([254.0]), -128, 127)
        >>> scale.item(), zero_point.item()
        (1.0, -127)
    """
    zero, one, nan = (as_float32(v, low) for v in (0.0, 1.0, torch.nan))
    low = torch.where(low >= 0, zero, low)
    high = torch.where(high <= 0, zero, high)
    steps = as_float32(qmax - qmin, low)
    amax = torch.maximum(high, -low)  # propagates NaN
    scale = high / steps - low / steps
    scale = torch.where(amax < AMAX_FLOOR, one, scale)
    scale = torch.where(amax < torch.inf, scale, nan)
    codes_below = torch.round(low * scale_recip(scale))  # <= 0, or NaN
    codes_below = torch.where(scale.isnan(), as_float32(qmin, low), torch.maximum(codes_below, -steps))
    return scale, qmin - codes_below.to(torch.int32)


def scale_recip(scale: Tensor) -> Tensor:
    """1 / scale by IEEE float32 division: reciprocal instructions may differ by one ulp (docs/numerics.md 2.2)."""
    return torch.ones_like(scale) / scale
