"""Implementations in plain torch, from pyquant.numerics: the CPU's where no compiled library is, with equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from pyquant import numerics
from pyquant.core.dtypes import INT4, INT8, ONE_A_BYTE, CodeType, code_type
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.ops import check, layer_zero_points, plan, rows_layout, shapes, values

# Served by this file even where the library is compiled, and on CUDA: no integer kernel is involved.
EVERYWHERE: Final = ("weight_only_linear", "float_linear", "gemm")
ON_CUDA: Final = (*EVERYWHERE, "pack_linear", "unpack_linear", "pack_int4", "unpack_int4")


def _given_zero_point(
    scale: Tensor, zero_point: Tensor | None = None, granularity: str = "per_tensor", group_size: int = 0,
    qmin: int = -127, qmax: int = 127, *_: Any,
) -> None:  # fmt: skip
    values.zero_points("zero_point", zero_point, qmin, qmax)


def quantize(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    shapes.quantize(x, *args, **kwargs)
    _given_zero_point(*args, **kwargs)
    return numerics.quantize(x, *args, **kwargs)


def quantize_dynamic(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    shapes.quantize_dynamic(x, *args, **kwargs)
    return numerics.quantize_dynamic(x, *args, **kwargs)


def rms_norm_quantize(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    shapes.rms_norm_quantize(x, *args, **kwargs)
    return numerics.rms_norm_quantize(x, *args, **kwargs)


def layer_norm_quantize(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    shapes.layer_norm_quantize(x, *args, **kwargs)
    return numerics.layer_norm_quantize(x, *args, **kwargs)


def add_rms_norm_quantize(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    shapes.add_rms_norm_quantize(x, *args, **kwargs)
    return numerics.add_rms_norm_quantize(x, *args, **kwargs)


def add_layer_norm_quantize(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    shapes.add_layer_norm_quantize(x, *args, **kwargs)
    return numerics.add_layer_norm_quantize(x, *args, **kwargs)


def silu_mul_quantize(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    shapes.silu_mul_quantize(x, *args, **kwargs)
    return numerics.silu_mul_quantize(x, *args, **kwargs)


def dequantize(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    shapes.dequantize(q, *args, **kwargs)
    zero_point = args[1] if len(args) > 1 else kwargs.get("zero_point")
    values.zero_points("zero_point", zero_point, *ONE_A_BYTE.get(q.dtype, INT8).range)
    return numerics.dequantize(q, *args, **kwargs)


def fake_quantize(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    shapes.fake_quantize(x, *args, **kwargs)
    _given_zero_point(*args, **kwargs)
    return numerics.fake_quantize(x, *args, **kwargs)


def fake_quantize_out(x: Tensor, *args: Any) -> None:
    shapes.fake_quantize_out(x, *args)
    _given_zero_point(*args)
    *given, y, mask = args
    check.apart("y", y, "x", x, same=True)
    check.apart("y", y, "scale", given[0])
    check.apart("mask", mask, "x", x)
    check.apart("mask", mask, "y", y)
    check.apart("mask", mask, "scale", given[0])
    check.apart("y", y, "zero_point", given[1])
    check.apart("mask", mask, "zero_point", given[1])
    _fill((y, mask), numerics.fake_quantize(x, *given))


def fake_quantize_dynamic(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    shapes.fake_quantize_dynamic(x, *args, **kwargs)
    return numerics.fake_quantize_dynamic(x, *args, **kwargs)


def fake_quantize_dynamic_out(x: Tensor, *args: Any) -> None:
    shapes.fake_quantize_dynamic_out(x, *args)
    *given, y, scale, zero_point = args
    check.apart("y", y, "x", x, same=True)
    for name, own, others in (("scale", scale, (x, y)), ("zero_point", zero_point, (x, y, scale))):
        for other_name, other in zip(("x", "y", "scale"), others, strict=False):
            check.apart(name, own, other_name, other)
    _fill((y, scale, zero_point), numerics.fake_quantize_dynamic(x, *given))


def fake_quantize_backward(grad: Tensor, mask: Tensor) -> Tensor:
    shapes.fake_quantize_backward(grad, mask)
    return numerics.fake_quantize_backward(grad, mask)


def fake_quantize_backward_(grad: Tensor, mask: Tensor) -> None:
    shapes.fake_quantize_backward_(grad, mask)
    check.apart("grad", grad, "mask", mask)
    _fill((grad,), (numerics.fake_quantize_backward(grad, mask),))


def fake_quantize_lsq_backward(grad: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    shapes.fake_quantize_lsq_backward(grad, x, *args, **kwargs)
    _given_zero_point(*args, **kwargs)
    return numerics.fake_quantize_lsq_backward(grad, x, *args, **kwargs)


def _fill(buffers: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
    for buffer, result in zip(buffers, results, strict=True):
        buffer.copy_(result)


def magnitude_histogram(x: Tensor, exponent: int) -> Tensor:
    shapes.magnitude_histogram(x, exponent)
    return numerics.magnitude_histogram(x, exponent)


def pack_int4(q: Tensor) -> Tensor:
    shapes.pack_int4(q)
    return numerics.pack_int4(q)


def unpack_int4(packed: Tensor, k: int) -> Tensor:
    shapes.unpack_int4(packed, k)
    return numerics.unpack_int4(packed, k)


def _gemm_zero_points(
    x_type: CodeType, w_scale: Tensor | None = None, x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    out_scale: Tensor | None = None, out_zero_point: Tensor | None = None, group_size: int = 0,
    activation: str = "none", clamp_min: float = 0.0, clamp_max: float = 0.0, out_qmin: int = -127,
    out_qmax: int = 127, *_: Any, **__: Any,
) -> None:  # fmt: skip
    values.zero_points("x_zero_point", x_zero_point, *x_type.range)
    values.zero_points("out_zero_point", out_zero_point, out_qmin, out_qmax)


def gemm_s8s8(x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    shapes.gemm_s8s8(x, w, *args, **kwargs)
    _gemm_zero_points(ONE_A_BYTE[x.dtype], *args, **kwargs)
    return numerics.gemm(x, w, *args, **kwargs)


def gemm_s8s4(x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    shapes.gemm_s8s4(x, w, *args, **kwargs)
    _gemm_zero_points(ONE_A_BYTE[x.dtype], *args, **kwargs)
    return numerics.gemm(x, numerics.unpack_int4(w, x.shape[-1]), *args, **kwargs)


def gemm_s4s4(x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    shapes.gemm_s4s4(x, w, *args, **kwargs)
    codes = numerics.unpack_int4(x, 2 * x.shape[-1]) if x.dtype == torch.uint8 else x
    _gemm_zero_points(INT4, *args, **kwargs)
    return numerics.gemm(codes, numerics.unpack_int4(w, codes.shape[-1]), *args, **kwargs)


def gemm(
    x: Tensor, w: Tensor, w_scale: Tensor | None = None, x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    out_scale: Tensor | None = None, out_zero_point: Tensor | None = None, group_size: int = 0,
    activation: str = "none", clamp_min: float = 0.0, clamp_max: float = 0.0, out_qmin: int = -127,
    out_qmax: int = 127, out_dtype: torch.dtype = torch.float32, kernel: str = "",
) -> Tensor:  # fmt: skip
    scaled = (w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size)
    fused = (activation, clamp_min, clamp_max)
    shapes.gemm(x, w, *scaled, *fused, out_qmin, out_qmax, out_dtype)
    if kernel:
        _refuse_kernel(kernel, x.device)
    op: Any = torch.ops.pyquant
    if w.dtype.is_floating_point:
        return op.float_linear(x, w, bias, residual, *fused, out_dtype)  # type: ignore[no-any-return]
    packed = shapes.gemm_x_is_packed("gemm", x, w)
    product = op.gemm_s8s8 if w.dtype == torch.int8 else op.gemm_s4s4 if packed else op.gemm_s8s4
    return product(x, w, *scaled, *fused, out_qmin, out_qmax, out_dtype)  # type: ignore[no-any-return]


def _refuse_kernel(name: str, device: torch.device) -> NoReturn:
    """Why a row of the kernel table does not run here: it is for CUDA tensors."""
    for row in plan.kernels():
        if row.name == name:
            chips = f"compute capability {row.sm_min / 10} to below {row.sm_end / 10}"
            raise UnsupportedError(
                f"no kernel of that name runs on {device}",
                [f"{name}: needs CUDA tensors, {chips}; kernel=None computes the same here"],
            )
    raise ArgumentError("kernel", repr(name), "a name of the kernel table, as ops.kernels() lists them")


def pack_linear(
    w: Tensor, w_scale: Tensor, bias: Tensor | None, x_scale: Tensor | None, x_zero_point: Tensor | None,
    out_scale: Tensor | None, out_zero_point: Tensor | None, spec: Sequence[int],
) -> Tensor:  # fmt: skip
    tensors = (w, w_scale, bias, x_scale, x_zero_point, out_scale, out_zero_point)
    shapes.pack_linear(*tensors, spec)
    s = shapes.linear_spec(spec)
    layer_zero_points.packed(s, x_zero_point, out_zero_point)
    return rows_layout.pack(s, *tensors)


def unpack_linear(packed: Tensor, spec: Sequence[int]) -> Tensor:
    shapes.unpack_linear(packed, spec)
    return rows_layout.unpack(shapes.linear_spec(spec), packed)


def qlinear(
    x: Tensor, packed: Tensor, residual: Tensor | None, spec: Sequence[int], out_dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None, x_zero_point: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = shapes.qlinear(x, packed, residual, spec, out_dtype, x_scale, x_zero_point)
    s = shapes.linear_spec(spec)
    p = rows_layout.parts(s, packed)
    layer_zero_points.called(s, x, packed, x_zero_point)
    if shapes.x_is_packed(s, x):
        x = numerics.unpack_int4(x, s.k)
    y = numerics.qlinear_reference(
        x, numerics.unpack(p.codes, s.k, s.w_type), p.w_scale, bias=p.bias,
        x_scale=p.x_scale if s.input == "static" else x_scale,
        x_zero_point=p.x_zero_point if s.input == "static" else x_zero_point, x_per_token=x_scale is not None,
        x_qmin=s.x_qmin, x_qmax=s.x_qmax, x_symmetric=s.x_symmetric, group_size=s.group_size, activation=s.activation,
        clamp_min=s.clamp_min, clamp_max=s.clamp_max, residual=residual, out_scale=p.out_scale if s.codes_out else None,
        out_zero_point=p.out_zero_point if s.codes_out else None, out_qmin=s.out_qmin, out_qmax=s.out_qmax,
        out_dtype=out.dtype,
    )  # fmt: skip
    return numerics.pack_int4(y) if s.codes_out and out.dtype == torch.uint8 else y


def weight_only_linear(x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    shapes.weight_only_linear(x, w, *args, **kwargs)
    zero_point = args[1] if len(args) > 1 else kwargs.get("w_zero_point")
    bits = args[4] if len(args) > 4 else kwargs.get("w_bits", 8)
    values.zero_points("w_zero_point", zero_point, *code_type(bits).range)
    return numerics.weight_only_linear(x, w, *args, **kwargs)


def float_linear(x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    shapes.float_linear(x, w, *args, **kwargs)
    return numerics.float_linear(x, w, *args, **kwargs)
