"""Shape, dtype and refusal rule of every op: what torch.compile sees, and what the fallback checks first.

Each rule takes the op's arguments, raises ArgumentError, and returns an empty result of the right shape, dtype and
device. Those of products with a weight matrix are in linear_shapes.py, of convolutions in conv_shapes.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyquant.core.dtypes import FLOATS, describe
from pyquant.core.granularity import scale_shape
from pyquant.core.names import GRANULARITIES
from pyquant.errors import ArgumentError
from pyquant.numerics import histogram
from pyquant.numerics.hadamard import base_of
from pyquant.ops import check, conv_shapes, linear_shapes


def rule_of(op: str) -> Callable[..., Any]:
    """The rule of an op, by its name."""
    rule: Callable[..., Any] = getattr(linear_shapes, op, None) or getattr(conv_shapes, op, None) or globals()[op]
    return rule


def _scale_shape(x: Tensor, granularity: str, group_size: int) -> list[int]:
    if granularity in GRANULARITIES and granularity != "per_tensor":
        check.min_dim("x", x, 1)
    return list(scale_shape(granularity, x.shape, group_size))


def _qparams(x: Tensor, scale: Tensor, zero_point: Tensor | None, granularity: str, group_size: int) -> None:
    shape = _scale_shape(x, granularity, group_size)
    check.strided("scale", scale)
    fits = check.scalar_or if granularity == "per_tensor" else check.vector
    fits("scale", scale, x, torch.float32, shape)
    fits("zero_point", zero_point, x, torch.int32, shape)


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    qmin: int = -127,
    qmax: int = 127,
) -> Tensor:
    check.dtype_in("x", x, FLOATS)
    _qparams(x, scale, zero_point, granularity, group_size)
    check.code_range(qmin, qmax)
    if zero_point is None and not qmin <= 0 <= qmax:
        raise ArgumentError("zero_point", None, f"int32 from {qmin} to {qmax}: 0 is none of these codes")
    return x.new_empty(x.shape, dtype=torch.int8)


def quantize_dynamic(
    x: Tensor,
    granularity: str = "per_token",
    group_size: int = 0,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    check.dtype_in("x", x, FLOATS)
    shape = _scale_shape(x, granularity, group_size)
    _dynamic_code_range(symmetric, qmin, qmax)
    codes = x.new_empty(x.shape, dtype=torch.int8)
    return codes, x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def _dynamic_code_range(symmetric: bool, qmin: int, qmax: int) -> None:
    check.code_range(qmin, qmax)
    if symmetric and (qmin > -1 or qmax < 1):
        raise ArgumentError("qmin", qmin, "below zero, with qmax above zero, when symmetric")


def _per_token(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    lead = list(x.shape[:-1])
    codes = x.new_empty([*lead, k], dtype=torch.int8)
    return codes, x.new_empty(lead, dtype=torch.float32), x.new_empty(lead, dtype=torch.int32)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    return layer_norm_quantize(x, weight, None, eps, symmetric, qmin, qmax)


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    check.rows_of_floats("x", x)
    check.vector("weight", weight, x, FLOATS, x.shape[-1:])
    check.vector("bias", bias, x, FLOATS, x.shape[-1:])
    if not 0 <= eps < math.inf:
        raise ArgumentError("eps", eps, "a finite number from 0")
    _dynamic_code_range(symmetric, qmin, qmax)
    return _per_token(x, x.shape[-1])


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    check.strided("residual", residual)
    check.rows_of_floats("x", x)
    check.operand("residual", residual, x, x.dtype, x.shape)
    return x.new_empty(x.shape)


def add_rms_norm_quantize(x: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    total = _sum(x, residual)
    return (*rms_norm_quantize(x, *args, **kwargs), total)


def add_layer_norm_quantize(x: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    total = _sum(x, residual)
    return (*layer_norm_quantize(x, *args, **kwargs), total)


def silu_mul_quantize(
    x: Tensor, symmetric: bool = True, qmin: int = -127, qmax: int = 127
) -> tuple[Tensor, Tensor, Tensor]:
    check.rows_of_floats("x", x)
    if x.shape[-1] % 2 != 0:
        raise ArgumentError("x", describe(x), "an even last dimension, gates then ups")
    _dynamic_code_range(symmetric, qmin, qmax)
    return _per_token(x, x.shape[-1] // 2)


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
    check.rows_of_floats("x", x)
    check.operand("up", up, x, x.dtype, x.shape)
    check.activation(activation, clamp_min, clamp_max)
    _dynamic_code_range(symmetric, qmin, qmax)
    return _per_token(x, x.shape[-1])


def hadamard_transform(x: Tensor, block: int, scale: float | None = None) -> Tensor:
    check.rows_of_floats("x", x)
    if base_of(block) is None or x.shape[-1] % block != 0:
        allowed = f"m * 2^k that divides the {x.shape[-1]} columns of x, with m one of 1, 12, 20, 28"
        raise ArgumentError("block", str(block), allowed)
    if scale is not None and not 2.0**-149 <= scale <= torch.finfo(torch.float32).max:
        raise ArgumentError("scale", f"{scale:g}", "a number above 0 that float32 has, or None")
    return x.new_empty(x.shape)


def hadamard_quantize(
    x: Tensor, block: int, symmetric: bool = True, qmin: int = -127, qmax: int = 127, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    hadamard_transform(x, block, scale)
    _dynamic_code_range(symmetric, qmin, qmax)
    return _per_token(x, x.shape[-1])


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out_dtype = out_dtype or torch.float32
    check.dtype_in("q", q, (torch.int8, torch.uint8))
    _qparams(q, scale, zero_point, granularity, group_size)
    check.dtype_among("out_dtype", out_dtype, FLOATS)
    return q.new_empty(q.shape, dtype=out_dtype)


def fake_quantize(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    quantize(x, *args, **kwargs)
    return x.new_empty(x.shape), x.new_empty([(x.numel() + 7) // 8], dtype=torch.uint8)


def fake_quantize_out(x: Tensor, *args: Any) -> None:
    *given, y, mask = args
    _buffers(("y", "mask"), (y, mask), fake_quantize(x, *given))


def fake_quantize_dynamic(
    x: Tensor, granularity: str = "per_channel", *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, zero_point = quantize_dynamic(x, granularity, *args, **kwargs)
    return x.new_empty(x.shape), scale, zero_point


def fake_quantize_dynamic_out(x: Tensor, *args: Any) -> None:
    *given, y, scale, zero_point = args
    _buffers(("y", "scale", "zero_point"), (y, scale, zero_point), fake_quantize_dynamic(x, *given))


def _buffers(names: Sequence[str], buffers: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    for name, buffer, like in zip(names, buffers, results, strict=True):
        check.buffer(name, buffer, like)


def fake_quantize_backward(grad: Tensor, mask: Tensor) -> Tensor:
    check.dtype_in("grad", grad, FLOATS)
    check.dtype_in("mask", mask, (torch.uint8,))
    check.same_device("mask", mask, grad, "grad")
    check.shape_is("mask", mask, [(grad.numel() + 7) // 8])
    return grad.new_empty(grad.shape)


def fake_quantize_backward_(grad: Tensor, mask: Tensor) -> None:
    check.buffer("grad", grad, fake_quantize_backward(grad, mask))


def fake_quantize_lsq_backward(
    grad: Tensor, x: Tensor, scale: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    quantize(x, scale, *args, **kwargs)
    check.operand("grad", grad, x, x.dtype, x.shape)
    return x.new_empty(x.shape), scale.new_empty(scale.shape)


def magnitude_histogram(x: Tensor, exponent: int) -> Tensor:
    check.dtype_in("x", x, FLOATS)
    if not histogram.EXPONENT_MIN <= exponent <= histogram.EXPONENT_MAX:
        raise ArgumentError("exponent", exponent, f"{histogram.EXPONENT_MIN} to {histogram.EXPONENT_MAX}")
    return x.new_empty([2, histogram.BINS], dtype=torch.int64)


def pack_int4(q: Tensor) -> Tensor:
    check.dtype_in("q", q, (torch.int8,))
    check.min_dim("q", q, 1)
    return q.new_empty([*q.shape[:-1], (q.shape[-1] + 1) // 2], dtype=torch.uint8)


def unpack_int4(packed: Tensor, k: int) -> Tensor:
    check.dtype_in("packed", packed, (torch.uint8,))
    check.min_dim("packed", packed, 1)
    if k < 0 or packed.shape[-1] != (k + 1) // 2:
        raise ArgumentError("k", k, f"{max(2 * packed.shape[-1] - 1, 0)} or {2 * packed.shape[-1]}")
    return packed.new_empty([*packed.shape[:-1], k], dtype=torch.int8)
