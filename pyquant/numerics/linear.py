"""Whole layers on explicit tensors: the fused integer Linear, and the layers outside the exact contract."""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.core.dtypes import code_type
from pyquant.numerics.epilogue import finish
from pyquant.numerics.gemm import gemm
from pyquant.numerics.pack import unpack
from pyquant.numerics.quantize import dequantize, quantize, quantize_dynamic


def qlinear_reference(
    x: Tensor,
    codes: Tensor,
    w_scale: Tensor,
    *,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
    x_per_token: bool = False,
    x_qmin: int = -127,
    x_qmax: int = 127,
    x_symmetric: bool = True,
    group_size: int = 0,
    activation: str = "none",
    clamp_min: float = 0.0,
    clamp_max: float = 0.0,
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
    out_qmin: int = -127,
    out_qmax: int = 127,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The fused quantised Linear: quantise x (unless it is codes), multiply exactly, ordered epilogue, store.

    x             float32, float16 or bfloat16 [..., K]; or int8 / uint8 codes of x_scale, x_zero_point.
    codes         int8 [N, K]; w_scale float32 [N] or [N, K / group_size].
    x_scale       None: every row is quantised under a scale of its own (x_symmetric, else affine); float32 [1]: one
                  calibrated scale, with x_zero_point int32 [1] (None = 0), which for uint8 codes counts in uint8 terms.
    x_per_token   x_scale (and x_zero_point, or None) are float32 (int32) [...], those of the rows of codes in x.
    out_scale     float32 [1]: the result is int8 codes; None: floats of out_dtype, by default x.dtype, or float32 for
                  code inputs.
    Others, result and source as pyquant.numerics.gemm.gemm.
    """
    if out_dtype is None:
        out_dtype = x.dtype if x.dtype.is_floating_point else torch.float32
    x_q = x
    if x_scale is None:
        x_q, x_scale, x_zero_point = quantize_dynamic(x, "per_token", 0, x_symmetric, x_qmin, x_qmax)
        x_zero_point, x_per_token = None if x_symmetric else x_zero_point, True
    if x_per_token:
        if x.dim() == 1:  # one row: its scale is a token's, not a tensor's
            x_q, x_scale = x_q.unsqueeze(0), x_scale.unsqueeze(0)
    else:
        x_scale = x_scale.reshape(())
        x_zero_point = None if x_zero_point is None else x_zero_point.reshape(())
        if x.dtype.is_floating_point:
            x_q = quantize(x, x_scale, x_zero_point, "per_tensor", 0, x_qmin, x_qmax)
    scaled = (w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size)
    out = (out_qmin, out_qmax, torch.int8 if out_scale is not None else out_dtype)
    y = gemm(x_q, codes, *scaled, activation, clamp_min, clamp_max, *out)
    return y.reshape(*x.shape[:-1], codes.shape[0])


def weight_only_linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    w_bits: int = 8,
    group_size: int = 0,
    activation: str = "none",
    clamp_min: float = 0.0,
    clamp_max: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Linear with integer weights and float activations; float32 accumulation in any order (docs/numerics.md 8)."""
    codes = unpack(w, x.shape[-1], code_type(w_bits))
    granularity = "per_group" if group_size else "per_channel"
    real = dequantize(codes, w_scale, w_zero_point, granularity, group_size)
    return float_linear(x, real, bias, residual, activation, clamp_min, clamp_max, out_dtype)


def float_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    clamp_min: float = 0.0,
    clamp_max: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Linear of float weights with the epilogue of the integer layers, likewise."""
    with torch.autocast(x.device.type, enabled=False):  # it would narrow the operands
        t = torch.nn.functional.linear(x.to(torch.float32), w.to(torch.float32))
    t = finish(t, bias=bias, residual=residual, activation=activation, clamp_min=clamp_min, clamp_max=clamp_max)
    return t.to(x.dtype if out_dtype is None else out_dtype)
