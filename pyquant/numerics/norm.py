"""Norm or gate in front of a per-token quantiser, in a fixed order of additions (docs/numerics.md 9)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from pyquant.numerics.activation import silu
from pyquant.numerics.epilogue import activate
from pyquant.numerics.fp32 import sqrt
from pyquant.numerics.qparams import as_float32
from pyquant.numerics.quantize import quantize_dynamic

SUM_LANES: Final = 2048


def sum_in_lanes(x: Tensor) -> Tensor:
    """Sum over the last dimension in the one order that every backend keeps.

    x   float32 [..., K].
    ->  float32 [...]. Element k belongs to lane k % 2048; a lane adds its elements, ascending, to +0; the lanes are
        added pairwise, neighbours first. Lanes without an element are +0 and change nothing.
    Source: docs/numerics.md 9.1.

    Example:
        >>> sum_in_lanes(torch.tensor([1.0, 2.0**-24, 2.0**-24])).item() == 1.0
        True
    """
    k = x.shape[-1]
    rounds = max(-(-k // SUM_LANES), 1)
    return sum_of_lanes(F.pad(x, (0, rounds * SUM_LANES - k)).unflatten(-1, (rounds, SUM_LANES)))


def sum_of_lanes(rows: Tensor) -> Tensor:
    """[..., R, lanes] -> [...]: a lane adds its elements, ascending, to +0; lanes are added pairwise, in order."""
    lanes = torch.zeros_like(rows[..., 0, :])
    for i in range(rows.shape[-2]):
        lanes = lanes + rows[..., i, :]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def _mean(x: Tensor) -> Tensor:
    return (sum_in_lanes(x) / as_float32(x.shape[-1], x)).unsqueeze(-1)


def _factor(mean_square: Tensor, eps: float) -> Tensor:
    shifted = mean_square + as_float32(eps, mean_square)
    factor = torch.ones_like(shifted) / sqrt(shifted)
    return torch.where(shifted < torch.inf, factor, as_float32(torch.nan, shifted))


def _scaled(t: Tensor, factor: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    t = t * factor
    if weight is not None:
        t = t * weight.to(torch.float32)
    return t if bias is None else t + bias.to(torch.float32)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x [..., K] / sqrt(mean(x^2) + eps) * weight [K] in float32 (docs/numerics.md 9.2).

    A row with a NaN, an infinity or a sum of squares beyond float32 is NaN throughout.
    """
    t = x.to(torch.float32)
    return _scaled(t, _factor(_mean(t * t), eps), weight, None)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias in float32; NaN as in rms_norm."""
    t = x.to(torch.float32)
    t = t - _mean(t)
    return _scaled(t, _factor(_mean(t * t), eps), weight, bias)


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up in float32 [..., K], where x [..., 2K] holds gates and then ups (docs/numerics.md 9.2)."""
    gate, up = x.to(torch.float32).chunk(2, -1)
    return silu(gate.contiguous()) * up


def activation_mul(
    x: Tensor, up: Tensor, activation: str = "silu", clamp_min: float = 0.0, clamp_max: float = 0.0
) -> Tensor:
    """activation(x) * up in float32 [..., K]; x and up of one dtype and shape (docs/numerics.md 9.2)."""
    return activate(x.to(torch.float32).contiguous(), activation, clamp_min, clamp_max) * up.to(torch.float32)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_dynamic, per token, of rms_norm, which is not rounded to 16 bits in between."""
    return quantize_dynamic(rms_norm(x, weight, eps), "per_token", 0, symmetric, qmin, qmax)


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_dynamic, per token, of layer_norm, which is not rounded to 16 bits in between."""
    return quantize_dynamic(layer_norm(x, weight, bias, eps), "per_token", 0, symmetric, qmin, qmax)


def add(x: Tensor, residual: Tensor) -> Tensor:
    """x + residual: one float32 addition, then one rounding to the type of x. The norm reads the rounded sum."""
    return (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype)


def add_rms_norm_quantize(x: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """rms_norm_quantize of add(x, residual), and that sum."""
    total = add(x, residual).contiguous()
    return (*rms_norm_quantize(total, *args, **kwargs), total)


def add_layer_norm_quantize(x: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """layer_norm_quantize of add(x, residual), and that sum."""
    total = add(x, residual).contiguous()
    return (*layer_norm_quantize(total, *args, **kwargs), total)


def silu_mul_quantize(
    x: Tensor, symmetric: bool = True, qmin: int = -127, qmax: int = 127
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_dynamic, per token, of silu_mul, which is not rounded to 16 bits in between."""
    return quantize_dynamic(silu_mul(x), "per_token", 0, symmetric, qmin, qmax)


def activation_mul_quantize(
    x: Tensor,
    up: Tensor,
    activation: str = "silu",
    clamp_min: float = 0.0,
    clamp_max: float = 0.0,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_dynamic, per token, of activation_mul, which is not rounded to 16 bits in between."""
    product = activation_mul(x, up, activation, clamp_min, clamp_max)
    return quantize_dynamic(product, "per_token", 0, symmetric, qmin, qmax)
