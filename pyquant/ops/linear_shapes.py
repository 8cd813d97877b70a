"""Shape, dtype and refusal rules of the ops that multiply by a weight matrix, as in shapes.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pyquant.core.bounds import k_max, k_max_affine
from pyquant.core.dtypes import FLOATS, INT4, KERNEL_BITS, ONE_A_BYTE, PRODUCTS, code_type, describe, dtype_name
from pyquant.errors import ArgumentError
from pyquant.ops import check
from pyquant.ops.rows_layout import BLOCKED, STEP_CODES, packed_bytes
from pyquant.ops.spec import WIRE_FIELDS, LinearSpec


def _epilogue(x: Tensor, n: int, residual: Tensor | None, activation: str, clamp_min: float, clamp_max: float) -> None:
    check.activation(activation, clamp_min, clamp_max)
    check.vector("residual", residual, x, FLOATS, [*x.shape[:-1], n])


def _gemm(
    op: str,
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
    codes = (torch.int8, torch.uint8)
    if op == "gemm":
        check.dtype_in("w", w, (*codes, torch.float16, torch.bfloat16))
    is_float = op == "gemm" and w.dtype.is_floating_point
    check.dtype_in("x", x, (w.dtype,) if is_float else codes)
    check.min_dim("x", x, 1)
    x_type, w_type = PRODUCTS.get(op) or PRODUCTS["gemm_s8s4" if w.dtype == INT4.storage else "gemm_s8s8"]
    if op != "gemm":
        check.dtype_in("w", w, (w_type.storage,))
    check.exact_dim("w", w, 2)
    check.same_device("w", w, x)
    packed = gemm_x_is_packed(op, x, w)
    lead, k, n = list(x.shape[:-1]), x.shape[-1] * (2 if packed else 1), w.shape[0]
    check.shape_is("w", w, [n, w_type.columns(k)])
    if is_float:
        scales = {"w_scale": w_scale, "x_scale": x_scale, "x_zero_point": x_zero_point}
        when = "where x and w are floats"
        _absent(when, group_size, **scales, out_scale=out_scale, out_zero_point=out_zero_point)
        check.dtype_among("out_dtype", out_dtype, FLOATS, f" {when}")
    check.group(group_size, k)
    if not is_float:
        t = INT4 if packed or x_type is INT4 else ONE_A_BYTE[x.dtype]
        limit = k_max(t.largest, w_type.largest) if x_zero_point is None else k_max_affine(*t.range, w_type.largest)
        _check_k("x", "K", k, limit)
    check.scalar_or("x_scale", x_scale, x, torch.float32, lead)
    check.scalar_or("x_zero_point", x_zero_point, x, torch.int32, lead)
    scale_of_w = [n, k // group_size] if group_size else [n]
    check.vector("w_scale", w_scale, x, torch.float32, scale_of_w)
    check.vector("bias", bias, x, torch.float32, [n])
    _epilogue(x, n, residual, activation, clamp_min, clamp_max)
    check.dtype_among("out_dtype", out_dtype, (*FLOATS, torch.int32, torch.int8))
    if out_dtype == torch.int32:
        _only_accumulator(group_size, activation, w_scale=w_scale, x_scale=x_scale, bias=bias, residual=residual)
    elif w_scale is None and not is_float:
        raise ArgumentError("w_scale", "None", f"float32 {scale_of_w}")
    if out_dtype == torch.int8:
        if out_scale is None:
            raise ArgumentError("out_scale", "None", "float32 [1] when out_dtype is int8")
        check.code_range(out_qmin, out_qmax, ("out_qmin", "out_qmax"))
    else:
        _absent("unless out_dtype is int8", 0, out_scale=out_scale, out_zero_point=out_zero_point)
    check.scalar_or("out_scale", out_scale, x, torch.float32, [1])
    check.scalar_or("out_zero_point", out_zero_point, x, torch.int32, [1])
    return x.new_empty([*lead, n], dtype=out_dtype)


def gemm_x_is_packed(op: str, x: Tensor, w: Tensor) -> bool:
    """Whether x holds two int4 codes a byte. For op gemm the shapes decide; a row of one code is not packed."""
    if x.dtype != torch.uint8 or op in ("gemm_s8s8", "gemm_s8s4"):
        return False
    return op == "gemm_s4s4" or (w.dtype == torch.uint8 and x.shape[-1] == w.shape[-1] != 1)


def _only_accumulator(group_size: int, activation: str, **scaled: Tensor | None) -> None:
    _absent("when out_dtype is int32 (the accumulator has no scale)", 0, **scaled)
    _absent("when out_dtype is int32", group_size)
    if activation != "none":
        raise ArgumentError("activation", repr(activation), "'none' when out_dtype is int32")


def _absent(when: str, group_size: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            raise ArgumentError(name, "a tensor", f"None {when}")
    if group_size != 0:
        raise ArgumentError("group_size", group_size, f"0 {when}")


def _check_k(argument: str, what: str, k: int, limit: int) -> None:
    if k > limit:
        allowed = f"{what[-1]} <= {limit}, beyond which an int32 accumulator can overflow"
        raise ArgumentError(argument, f"{what} = {k}", allowed)


gemm, gemm_s8s8 = partial(_gemm, "gemm"), partial(_gemm, "gemm_s8s8")
gemm_s8s4, gemm_s4s4 = partial(_gemm, "gemm_s8s4"), partial(_gemm, "gemm_s4s4")


def linear_spec(spec: Sequence[int]) -> LinearSpec:
    """A checked LinearSpec from the op's int[]."""
    if len(spec) != WIRE_FIELDS:
        raise ArgumentError("spec", f"{len(spec)} integers", f"{WIRE_FIELDS}, as LinearSpec.to_ints() gives")
    try:
        s = LinearSpec.from_ints(list(spec))
    except ArgumentError:
        raise ArgumentError("spec", list(spec), "integers as LinearSpec.to_ints() gives") from None
    if not (0 <= s.n < check.MAX_SIZE and 0 <= s.k < check.MAX_SIZE):
        raise ArgumentError("spec", f"n = {s.n}, k = {s.k}", f"n and k from 0 to {check.MAX_SIZE - 1}")
    check.one_of("spec", s.w_bits, KERNEL_BITS)
    if s.layout == BLOCKED and s.w_type is not INT4:
        raise ArgumentError("spec", f"layout '{BLOCKED}' with {s.w_bits} bits", "4-bit weights in that layout")
    check.group(s.group_size, s.k)
    if s.two_level:
        _check_two_level(s)
    check.code_range(s.x_qmin, s.x_qmax, ("spec", "spec"))
    check.code_range(s.out_qmin, s.out_qmax, ("spec", "spec"))
    reach = max(-s.x_qmin, s.x_qmax) if s.x_symmetric else s.x_qmax - s.x_qmin
    _check_k("spec", "k", s.k, k_max(max(reach, 1), s.largest))
    return s


def _check_two_level(s: LinearSpec) -> None:
    """Steps stay beside 4-bit codes for the kernels of GPUs; CPUs get the products of both, 8-bit weights."""
    is_blocked = s.layout == BLOCKED
    is_divided = s.group_size > 0 and (not is_blocked or s.group_size % STEP_CODES == 0)
    if s.layout == "cpu_blocked" or s.w_type is not INT4 or not is_divided:
        allowed = f"4-bit weights with a group size in layout 'rows', or a multiple of {STEP_CODES} in '{BLOCKED}'"
        got = f"two levels of scales with {s.w_bits} bits, group_size {s.group_size}"
        raise ArgumentError("spec", got, allowed)


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
    s = linear_spec(spec)
    check.dtype_in("w", w, (s.w_type.storage,))
    check.shape_is("w", w, [s.n, s.w_type.columns(s.k)])
    check.operand("w_scale", w_scale, w, torch.float32, [s.n, s.k // s.group_size] if s.group_size else [s.n])
    _present("bias", bias, s.has_bias, f"float32 [{s.n}]")
    check.vector("bias", bias, w, torch.float32, [s.n])
    _present("x_scale", x_scale, s.input == "static", "float32 [1]")
    check.scalar_or("x_scale", x_scale, w, torch.float32, [1])
    if s.input != "static":
        _present("x_zero_point", x_zero_point, False)
    check.scalar_or("x_zero_point", x_zero_point, w, torch.int32, [1])
    _present("out_scale", out_scale, s.codes_out, "float32 [1]")
    check.scalar_or("out_scale", out_scale, w, torch.float32, [1])
    if not s.codes_out:
        _present("out_zero_point", out_zero_point, False)
    check.scalar_or("out_zero_point", out_zero_point, w, torch.int32, [1])
    return w.new_empty([packed_bytes(s)], dtype=torch.uint8)


def _present(argument: str, tensor: Tensor | None, required: bool, allowed: str = "") -> None:
    if required and tensor is None:
        raise ArgumentError(argument, "None", f"{allowed}, as the spec says")
    if not required and tensor is not None:
        raise ArgumentError(argument, describe(tensor), "None, as the spec says")


def unpack_linear(packed: Tensor, spec: Sequence[int]) -> Tensor:
    s = linear_spec(spec)
    packed_buffer(packed, s)
    return packed.new_empty([s.n, s.w_type.columns(s.k)], dtype=s.w_type.storage)


def packed_buffer(packed: Tensor, s: LinearSpec) -> None:
    """Refuses what pack_linear did not make under that spec."""
    check.dtype_in("packed", packed, (torch.uint8,))
    check.shape_is("packed", packed, [packed_bytes(s)])
    if not packed.is_contiguous():
        raise ArgumentError(
            "packed", f"strides {list(packed.stride())}", "a contiguous buffer, as pack_linear gives it"
        )


def codes_bound(s: LinearSpec, x: Tensor) -> None:
    """Codes that come ready were not clamped to the spec's limits: their type bounds K, whatever the spec says."""
    t = INT4 if x_is_packed(s, x) else ONE_A_BYTE[x.dtype]
    low, high = t.range
    reach = t.largest  # of uint8: its zero point included
    if low < 0 and not s.x_symmetric:
        reach = max(reach, high - s.x_qmin, s.x_qmax - low)
    _check_k("x", f"{t.native_name} codes with k", s.k, k_max(reach, s.largest))


def x_is_packed(s: LinearSpec, x: Tensor) -> bool:
    """Whether x holds two 4-bit codes a byte. One code is one byte either way, and then means a code of its own."""
    is_candidate = x.dtype == torch.uint8 and INT4.holds(s.x_qmin, s.x_qmax)
    return is_candidate and x.shape[-1] == (s.k + 1) // 2 != s.k


def codes_params(
    s: LinearSpec, x: Tensor, x_scale: Tensor | None, x_zero_point: Tensor | None, shape: Sequence[int]
) -> None:
    """What came with the codes x under a spec with dynamic inputs, of this shape."""
    if x_scale is not None and s.input == "static":
        raise ArgumentError("x_scale", "a tensor", "None where inputs are static")
    if x_zero_point is not None and (x_scale is None or s.x_symmetric):
        raise ArgumentError("x_zero_point", "a tensor", "None unless x_scale is there and inputs are affine")
    check.vector("x_scale", x_scale, x, torch.float32, shape)
    check.vector("x_zero_point", x_zero_point, x, torch.int32, shape)


def qlinear(
    x: Tensor,
    packed: Tensor,
    residual: Tensor | None,
    spec: Sequence[int],
    out_dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
) -> Tensor:
    if x.dtype == torch.int32:
        if out_dtype is None:
            raise ArgumentError(
                "x", describe(x), "float32 or float16 or bfloat16; int32 accumulators with an out_dtype"
            )
        return _finished(x, packed, residual, spec, out_dtype, x_scale, x_zero_point)
    s = linear_spec(spec)
    codes = (torch.int8, torch.uint8) if s.input == "static" else ()
    given = (torch.int8, torch.uint8) if INT4.holds(s.x_qmin, s.x_qmax) else (torch.int8,)
    check.dtype_in("x", x, (*FLOATS, *codes) if x_scale is None else given)
    check.min_dim("x", x, 1)
    codes_params(s, x, x_scale, x_zero_point, list(x.shape[:-1]))
    if x.shape[-1] != s.k and not x_is_packed(s, x):
        raise ArgumentError("x", describe(x), f"last dimension {s.k} (in_features)")
    if x_scale is not None and x.dtype == torch.uint8 and not x_is_packed(s, x):
        raise ArgumentError("x", describe(x), "int8, or uint8 with two codes a byte")
    packed_buffer(packed, s)
    check.same_device("packed", packed, x)
    lead = list(x.shape[:-1])
    _epilogue(x, s.n, residual, s.activation, s.clamp_min, s.clamp_max)
    if not x.dtype.is_floating_point:
        codes_bound(s, x)
    if out_dtype == torch.int32:
        return _accumulators(s, x, residual, lead)
    return _results(s, x, lead, out_dtype, x.dtype if x.dtype.is_floating_point else torch.float32)


def _accumulators(s: LinearSpec, x: Tensor, residual: Tensor | None, lead: Sequence[int]) -> Tensor:
    when = "when out_dtype is int32 (the accumulator has no scale)"
    _one_scale_a_channel(s, when)
    _absent(when, 0, residual=residual)
    if x.dtype.is_floating_point and s.input == "dynamic":
        allowed = "codes with their x_scale where out_dtype is int32 and inputs are dynamic"
        raise ArgumentError("x", describe(x), allowed)
    return x.new_empty([*lead, s.n], dtype=torch.int32)


def _finished(
    x: Tensor,
    packed: Tensor,
    residual: Tensor | None,
    spec: Sequence[int],
    out_dtype: torch.dtype | None,
    x_scale: Tensor | None,
    x_zero_point: Tensor | None,
) -> Tensor:
    """Of a call that goes on from accumulators."""
    s = linear_spec(spec)
    _one_scale_a_channel(s, "where x holds accumulators")
    check.min_dim("x", x, 1)
    lead = list(x.shape[:-1])
    if x.shape[-1] != s.n:
        raise ArgumentError("x", describe(x), f"last dimension {s.n} (out_features) where x holds accumulators")
    _present("x_scale", x_scale, s.input == "dynamic", f"float32 {lead}")
    if x_zero_point is not None:
        raise ArgumentError("x_zero_point", "a tensor", "None where x holds accumulators")
    check.vector("x_scale", x_scale, x, torch.float32, lead)
    packed_buffer(packed, s)
    check.same_device("packed", packed, x)
    _epilogue(x, s.n, residual, s.activation, s.clamp_min, s.clamp_max)
    return _results(s, x, lead, out_dtype, torch.float32)


def _one_scale_a_channel(s: LinearSpec, when: str) -> None:
    if s.group_size and not s.two_level:
        raise ArgumentError("spec", f"group_size {s.group_size}", f"0, or two levels of scales, {when}")


def _results(
    s: LinearSpec, x: Tensor, lead: Sequence[int], out_dtype: torch.dtype | None, otherwise: torch.dtype
) -> Tensor:
    if s.codes_out:
        if out_dtype == torch.uint8 and INT4.holds(s.out_qmin, s.out_qmax):
            return x.new_empty([*lead, (s.n + 1) // 2], dtype=torch.uint8)
        if out_dtype not in (None, torch.int8):
            allowed = "int8, or uint8 for two codes a byte" if INT4.holds(s.out_qmin, s.out_qmax) else "int8"
            raise ArgumentError("out_dtype", dtype_name(out_dtype), allowed)
        return x.new_empty([*lead, s.n], dtype=torch.int8)
    dtype = otherwise if out_dtype is None else out_dtype
    check.dtype_among("out_dtype", dtype, FLOATS)
    return x.new_empty([*lead, s.n], dtype=dtype)


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
    check.rows_of_floats("x", x)
    check.one_of("w_bits", w_bits, KERNEL_BITS)
    w_type, k = code_type(w_bits), x.shape[-1]
    n = _matrix(w, x, (w_type.storage,), w_type.columns(k))
    check.group(group_size, k)
    shape = [n, k // group_size] if group_size else [n]
    check.operand("w_scale", w_scale, x, torch.float32, shape)
    check.vector("w_zero_point", w_zero_point, x, torch.int32, shape)
    return _float_result(x, n, bias, residual, activation, clamp_min, clamp_max, out_dtype)


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
    check.rows_of_floats("x", x)
    n = _matrix(w, x, FLOATS, x.shape[-1])
    return _float_result(x, n, bias, residual, activation, clamp_min, clamp_max, out_dtype)


def _matrix(w: Tensor, x: Tensor, dtypes: Sequence[torch.dtype], columns: int) -> int:
    """Weights [n, columns] -> n."""
    check.dtype_in("w", w, dtypes)
    check.exact_dim("w", w, 2)
    check.same_device("w", w, x)
    check.shape_is("w", w, [w.shape[0], columns])
    return w.shape[0]


def _float_result(
    x: Tensor,
    n: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    clamp_min: float,
    clamp_max: float,
    out_dtype: torch.dtype | None,
) -> Tensor:
    check.vector("bias", bias, x, torch.float32, [n])
    _epilogue(x, n, residual, activation, clamp_min, clamp_max)
    dtype = out_dtype if out_dtype is not None else x.dtype
    check.dtype_among("out_dtype", dtype, FLOATS)
    return x.new_empty([*x.shape[:-1], n], dtype=dtype)
