"""Implementations in plain torch, from pyquant.numerics: the CPU's where no compiled library is, with equal bits.

An op is its rule, a look at its zero points and its specification. Written out are those that fill buffers, choose
among others or read a packed layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from pyquant import numerics
from pyquant.core.dtypes import PRODUCTS
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.ops import check, conv, linear_shapes, plan, rows_layout, shapes, zero_points
from pyquant.ops.schema import SCHEMAS
from pyquant.ops.spec import LinearSpec

# Served by this file even where the library is compiled, and on CUDA: no integer kernel is involved.
EVERYWHERE: Final = ("float_linear", "gemm")
_BYTES: Final = ("pack_linear", "unpack_linear", "pack_int4", "unpack_int4")
ON_CUDA: Final = (*EVERYWHERE, "qconv2d", "weight_only_linear", *_BYTES)


def _specified(name: str) -> Callable[..., Any]:
    rule = shapes.rule_of(name)
    specification = partial(numerics.product, name) if name in PRODUCTS else getattr(numerics, name)

    def op(*args: Any, **kwargs: Any) -> Any:
        rule(*args, **kwargs)
        zero_points.check(name, args, kwargs)
        return specification(*args, **kwargs)

    return op


def fake_quantize_out(x: Tensor, *args: Any) -> None:
    shapes.fake_quantize_out(x, *args)
    *given, y, mask = args
    zero_points.check("fake_quantize", (x, *given), {})
    _check_apart({"x": x, "scale": given[0], "zero_point": given[1]}, {"y": y, "mask": mask})
    _fill((y, mask), numerics.fake_quantize(x, *given))


def fake_quantize_dynamic_out(x: Tensor, *args: Any) -> None:
    shapes.fake_quantize_dynamic_out(x, *args)
    *given, y, scale, zero_point = args
    _check_apart({"x": x}, {"y": y, "scale": scale, "zero_point": zero_point})
    _fill((y, scale, zero_point), numerics.fake_quantize_dynamic(x, *given))


def fake_quantize_backward_(grad: Tensor, mask: Tensor) -> None:
    shapes.fake_quantize_backward_(grad, mask)
    _check_apart({"mask": mask}, {"grad": grad})
    _fill((grad,), (numerics.fake_quantize_backward(grad, mask),))


def _check_apart(operands: dict[str, Tensor | None], buffers: dict[str, Tensor]) -> None:
    """No buffer shares memory with an operand or another buffer, but for y, which may be x itself."""
    for name, buffer in buffers.items():
        for other, tensor in operands.items():
            check.apart(name, buffer, other, tensor, same=(name, other) == ("y", "x"))
        operands = {**operands, name: buffer}


def _fill(buffers: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
    for buffer, result in zip(buffers, results, strict=True):
        buffer.copy_(result)


def gemm(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
    group_size: int = 0,
    activation: str = "none",
    clamp_min: float = 0.0,
    clamp_max: float = 0.0,
    out_qmin: int = -127,
    out_qmax: int = 127,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
) -> Tensor:
    out_dtype = out_dtype or torch.float32
    scaled = (w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size)
    fused = (activation, clamp_min, clamp_max)
    linear_shapes.gemm(x, w, *scaled, *fused, out_qmin, out_qmax, out_dtype)
    if kernel:
        _refuse_kernel(kernel, x.device)
    op = torch.ops.pyquant
    if w.dtype.is_floating_point:
        return op.float_linear(x, w, bias, residual, *fused, out_dtype)  # type: ignore[no-any-return]
    packed = linear_shapes.gemm_x_is_packed("gemm", x, w)
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
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    x_zero_point: Tensor | None,
    out_scale: Tensor | None,
    out_zero_point: Tensor | None,
    spec: Sequence[int],
) -> Tensor:
    tensors = (w, w_scale, bias, x_scale, x_zero_point, out_scale, out_zero_point)
    linear_shapes.pack_linear(*tensors, spec)
    zero_points.check("pack_linear", (*tensors, spec), {})
    return rows_layout.pack(linear_shapes.linear_spec(spec), *tensors)


def unpack_linear(packed: Tensor, spec: Sequence[int]) -> Tensor:
    linear_shapes.unpack_linear(packed, spec)
    return rows_layout.unpack(linear_shapes.linear_spec(spec), packed)


def qlinear(
    x: Tensor,
    packed: Tensor,
    residual: Tensor | None,
    spec: Sequence[int],
    out_dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
) -> Tensor:
    out = linear_shapes.qlinear(x, packed, residual, spec, out_dtype, x_scale, x_zero_point)
    s = linear_shapes.linear_spec(spec)
    if x.dtype == torch.int32:
        return _finished(s, rows_layout.parts(s, packed), x, residual, out.dtype, x_scale)
    zero_points.of_call(s, x, packed, x_zero_point)
    return _product(s, rows_layout.parts(s, packed), x, residual, out.dtype, x_scale, x_zero_point)


def _finished(
    s: LinearSpec,
    p: rows_layout.Parts,
    sums: Tensor,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    x_scale: Tensor | None,
) -> Tensor:
    t = sums.to(torch.float32)
    t = t * (p.x_scale * p.w_scale) if x_scale is None else t * p.w_scale * x_scale.unsqueeze(-1)
    low, high = s.clamp_min, s.clamp_max
    t = numerics.finish(t, bias=p.bias, residual=residual, activation=s.activation, clamp_min=low, clamp_max=high)
    if not s.codes_out:
        return numerics.store(t, out_dtype)
    qmin, qmax = s.out_qmin, s.out_qmax
    y = numerics.store(
        t, torch.int8, out_scale=p.out_scale, out_zero_point=p.out_zero_point, out_qmin=qmin, out_qmax=qmax
    )
    return numerics.pack_int4(y) if out_dtype == torch.uint8 else y


def _product(
    s: LinearSpec,
    p: rows_layout.Parts,
    x: Tensor,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    x_scale: Tensor | None,
    x_zero_point: Tensor | None,
) -> Tensor:
    if linear_shapes.x_is_packed(s, x):
        x = numerics.unpack_int4(x, s.k)
    codes = numerics.unpack(p.codes, s.k, s.w_type)
    if p.w_step is not None:
        codes = codes * p.w_step.view(torch.int8).repeat_interleave(s.group_size, 1)
    if out_dtype == torch.int32:
        zero_point = p.x_zero_point.reshape(()) if s.input == "static" else x_zero_point
        if x.dtype.is_floating_point:
            x = numerics.quantize(x, p.x_scale.reshape(()), zero_point, "per_tensor", 0, s.x_qmin, s.x_qmax)
        return numerics.accumulate(x, codes, zero_point)
    y = numerics.qlinear_reference(
        x,
        codes,
        p.w_scale,
        bias=p.bias,
        x_scale=p.x_scale if s.input == "static" else x_scale,
        x_zero_point=p.x_zero_point if s.input == "static" else x_zero_point,
        x_per_token=x_scale is not None,
        x_qmin=s.x_qmin,
        x_qmax=s.x_qmax,
        x_symmetric=s.x_symmetric,
        group_size=0 if s.two_level else s.group_size,
        activation=s.activation,
        clamp_min=s.clamp_min,
        clamp_max=s.clamp_max,
        residual=residual,
        out_scale=p.out_scale if s.codes_out else None,
        out_zero_point=p.out_zero_point if s.codes_out else None,
        out_qmin=s.out_qmin,
        out_qmax=s.out_qmax,
        out_dtype=out_dtype,
    )
    return numerics.pack_int4(y) if s.codes_out and out_dtype == torch.uint8 else y


def _in_groups(
    groups: int,
    rows: Tensor,
    packed: Tensor,
    residual: Tensor | None,
    spec: Sequence[int],
    out_dtype: torch.dtype,
    x_scale: Tensor | None,
    x_zero_point: Tensor | None,
) -> Tensor:
    """qlinear of the rows of every group [groups, rows, K] with the output channels of that group alone."""
    s = linear_shapes.linear_spec(spec)
    parts, each = rows_layout.parts(s, packed), s.n // groups
    results = []
    for group in range(groups):
        own = slice(group * each, (group + 1) * each)
        added = None if residual is None else residual[:, own]
        operands = (rows[group], added, out_dtype, x_scale, x_zero_point)
        results.append(_product(replace(s, n=each), parts.of_channels(own), *operands))
    return torch.cat(results, 1)


_outs = (fake_quantize_out, fake_quantize_dynamic_out, fake_quantize_backward_)
_own: dict[str, Callable[..., Any]] = {f.__name__: f for f in (*_outs, gemm, pack_linear, unpack_linear, qlinear)}
_own["qconv2d"] = partial(conv.by_patches, in_groups=_in_groups)
IMPLEMENTATIONS: Final = {name: _own.get(name) or _specified(name) for name in SCHEMAS}
