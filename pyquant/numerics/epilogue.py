"""From accumulator to result: the ordered float32 steps of docs/numerics.md 4 and the stores of 5."""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.numerics.activation import ACTIVATIONS
from pyquant.numerics.qparams import scale_recip
from pyquant.numerics.quantize import code_from_real


def activate(t: Tensor, activation: str, clamp_min: float = 0.0, clamp_max: float = 0.0) -> Tensor:
    """One activation by its name, of float32 of any shape; clamp_min and clamp_max are rounded to float32.

    Raises KeyError for another name (pyquant.ops refuses it earlier with an ArgumentError). Source: docs/numerics.md 6.
    """
    entry = ACTIVATIONS[activation]
    return entry.formula(t, *entry.limits(clamp_min, clamp_max))


def finish(
    t: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    clamp_min: float = 0.0,
    clamp_max: float = 0.0,
) -> Tensor:
    """The steps after scaling: + bias[n], activation, + residual[m, n]; each one rounding, absent ones not taken.

    t         float32 [..., N], scaled.
    bias      float32 [N]; residual float32, float16 or bfloat16 [..., N], widened first.
    Source: docs/numerics.md 4.
    """
    if bias is not None:
        t = t + bias
    t = activate(t, activation, clamp_min, clamp_max)
    if residual is not None:
        t = t + residual.to(torch.float32)
    return t


def store(
    t: Tensor,
    out_dtype: torch.dtype,
    *,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
    out_qmin: int = -127,
    out_qmax: int = 127,
) -> Tensor:
    """The last step: one rounding (half to even) of float32 [..., N] to a float type, or codes of the next layer.

    out_dtype  float32, float16 or bfloat16 (overflow gives infinity, as IEEE says); int8: requantised with
               out_scale [1] and out_zero_point [1] (None = 0) as docs/numerics.md 5 says.
    """
    if out_dtype != torch.int8 or out_scale is None:
        return t.to(out_dtype)
    recip = scale_recip(out_scale.reshape(()))
    return code_from_real(t, recip, None if out_zero_point is None else out_zero_point.reshape(()), out_qmin, out_qmax)
