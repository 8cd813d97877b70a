"""The ops that multiply by a weight matrix, as typed Python functions; see functional.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.ops import values
from pyquant.ops.translate import call

_ops = torch.ops.pyquant


def _words(spec: Sequence[int]) -> list[int]:
    if not isinstance(spec, (list, tuple)):
        raise ArgumentError("spec", arguments.shown(spec), "integers as LinearSpec.to_ints() gives")
    return list(spec)


def _gemm(op: Any, x: Tensor, w: Tensor, w_scale: Tensor | None, x_scale: Tensor | None, *rest: Any) -> Tensor:
    values.scale_values("w_scale", w_scale)
    values.scale_values("x_scale", x_scale, allow_nan=True)
    values.scale_values("out_scale", rest[3])
    return call(op, x, w, w_scale, x_scale, *rest)


def gemm_s8s8(
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
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Integer product of codes with the whole ordered epilogue in one op.

    x             int8 or uint8 codes [..., K].           w   int8 codes [N, K].
    w_scale       float32 [N], or [N, K / group_size].     x_scale       float32 [1] or x.shape[:-1], or None for 1.
    x_zero_point  int32 [1] or x.shape[:-1], or None.      bias          float32 [N] or None.
    residual      float [..., N], added after the activation ('none', 'relu', 'clamp', 'gelu', 'gelu_tanh', 'silu').
    out_dtype     float32, float16, bfloat16; int32: the accumulator after the zero-point term, no scales allowed;
                  int8: codes of out_scale and out_zero_point ([1]) within [out_qmin, out_qmax].
    ->            out_dtype [..., N].
    Raises ArgumentError (also for K beyond the int32 bound), NonFiniteError, UnsupportedError.
    Source: docs/numerics.md 3-5.

    Example:
        >>> x = torch.tensor([[1, 2]], dtype=torch.int8); w = torch.tensor([[3, 4]], dtype=torch.int8)
        >>> gemm_s8s8(x, w, out_dtype=torch.int32).tolist()
        [[11]]
    """
    scaled = (w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size)
    fused = (activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype)
    return _gemm(_ops.gemm_s8s8.default, x, w, *scaled, *fused)


def gemm_s8s4(
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
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """gemm_s8s8 with 4-bit weights: w is uint8 [N, ceil(K / 2)] as pack_int4 makes it.

    Example:
        >>> from pyquant.ops import pack_int4
        >>> w = pack_int4(torch.tensor([[3, 4]], dtype=torch.int8))
        >>> gemm_s8s4(torch.tensor([[1, 2]], dtype=torch.int8), w, out_dtype=torch.int32).tolist()
        [[11]]
    """
    scaled = (w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size)
    fused = (activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype)
    return _gemm(_ops.gemm_s8s4.default, x, w, *scaled, *fused)


def gemm_s4s4(
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
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """gemm_s8s4 with 4-bit activations: x holds codes in [-8, 7], one per int8 or two per uint8.

    x     int8 [..., K], or uint8 [..., K / 2] as pack_int4 makes them, K even. Where the device has int4 tensor cores
          (compute capability 8.0 to 8.9) they read packed codes; the others, and CPUs, one a byte. Codes that come the
          other way are rewritten by one pass where the plan expects that to pay. The result is the same.
    Raises ArgumentError, on the CPU also when a code of x lies outside [-8, 7].

    Example:
        >>> from pyquant.ops import pack_int4
        >>> w = pack_int4(torch.tensor([[3, 4]], dtype=torch.int8))
        >>> gemm_s4s4(torch.tensor([[1, 2]], dtype=torch.int8), w, out_dtype=torch.int32).tolist()
        [[11]]
    """
    values.int4_codes("x", x)
    scaled = (w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size)
    fused = (activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype)
    return _gemm(_ops.gemm_s4s4.default, x, w, *scaled, *fused)


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
    *,
    group_size: int = 0,
    activation: str = "none",
    clamp_min: float = 0.0,
    clamp_max: float = 0.0,
    out_qmin: int = -127,
    out_qmax: int = 127,
    out_dtype: torch.dtype = torch.float32,
    kernel: str | None = None,
) -> Tensor:
    """Every product of the kernel table, distinguished by the types of its operands, by a kernel of your choice.

    x, w     int8 or uint8 codes [..., K] and int8 [N, K]; the same and packed int4, uint8 [N, ceil(K / 2)]; packed int4
             both, uint8 [..., K / 2] and [N, K / 2]; float16 or bfloat16 both, [..., K] and [N, K].
    others   as gemm_s8s8. Floats take bias, residual and activation alone, give floats and have no gradient
             (float_linear has one).
    kernel   None: the plan chooses (floats: torch's product, where no measurement says otherwise). Else a name of
             ops.kernels(), with its tile, stages and schedule: it runs, or the call fails and says why not. Weights
             that a row reads in another order than a checkpoint's are repacked in each such call.
    ->       out_dtype [..., N]; the bits do not depend on the kernel where codes are multiplied.
    Raises ArgumentError, also for an unknown name; UnsupportedError where the kernel does not take the problem, with
    the reason: its types, the alignment, the device. Source: docs/kernels.md.

    Example:
        >>> x, w = torch.ones(2, 64, dtype=torch.float16), torch.ones(8, 64, dtype=torch.float16)
        >>> gemm(x, w, activation="relu", out_dtype=torch.float16)[0, 0].item()
        64.0
        >>> from pyquant.errors import UnsupportedError
        >>> try:
        ...     gemm(x, w, kernel="gemm_sm80_f16_256x128x64")  # on a GPU: this tile of three stages
        ... except UnsupportedError as error:
        ...     print(str(error).splitlines()[0])
        no kernel of that name runs on cpu
    """
    if kernel is not None and not isinstance(kernel, str):
        raise ArgumentError("kernel", arguments.shown(kernel), "the name of a kernel, or None")
    scaled = (w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size)
    fused = (activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype)
    return _gemm(_ops.gemm.default, x, w, *scaled, *fused, kernel or "")


def pack_linear(
    w: Tensor,
    w_scale: Tensor,
    spec: Sequence[int],
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """Codes, scales and bias of one Linear in the single buffer that qlinear reads, laid out for the device of `w`.

    w         int8 [N, K], or uint8 [N, ceil(K / 2)] for 4 bits.     w_scale   float32 [N] or [N, K / group_size].
    spec      LinearSpec(...).to_ints(); says which of the other operands must be present.
    ->        uint8 [bytes]; opaque: only qlinear and unpack_linear read it.
    Raises ArgumentError, NonFiniteError.

    Example:
        >>> from pyquant.ops import LinearSpec, layout_for
        >>> spec = LinearSpec(1, 2, layout=layout_for(torch.device("cpu"))).to_ints()
        >>> packed = pack_linear(torch.tensor([[3, 4]], dtype=torch.int8), torch.ones(1), spec)
        >>> unpack_linear(packed, spec).tolist()
        [[3, 4]]
    """
    values.scale_values("w_scale", w_scale)
    values.scale_values("x_scale", x_scale)
    values.scale_values("out_scale", out_scale)
    return call(
        _ops.pack_linear.default, w, w_scale, bias, x_scale, x_zero_point, out_scale, out_zero_point, _words(spec)
    )


def unpack_linear(packed: Tensor, spec: Sequence[int]) -> Tensor:
    """The weight codes of a packed buffer, exactly as pack_linear was given them."""
    return call(_ops.unpack_linear.default, packed, _words(spec))


def qlinear(
    x: Tensor,
    packed: Tensor,
    residual: Tensor | None = None,
    spec: Sequence[int] = (),
    out_dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
) -> Tensor:
    """A whole quantised Linear: quantise the rows (or take codes), multiply integers, ordered epilogue.

    x          float32, float16, bfloat16 [..., K]; with a static input also codes of that scale: int8, uint8, or two
               codes a byte as pack_int4 makes them (uint8 [..., ceil(K / 2)]; code limits in [-8, 7], K > 1).
    packed     uint8 buffer of pack_linear with the same spec.     residual   float [..., N] or None.
    out_dtype  None: x.dtype (float32 for codes). Where the spec says codes_out: int8, or uint8 for two codes a byte
               (out limits in [-8, 7]). int32, on a CPU: the accumulators after the zero-point term, and nothing of the
               epilogue (one scale a channel, or two levels of them; x is not quantised by its own rows then).
    x_scale, x_zero_point   float32 and int32 [...], one a row: what came with the codes, int8 [..., K] (of 4 bits also
               uint8, two a byte), of a spec with dynamic inputs (quantize_dynamic "per_token", rms_norm_quantize ...);
               x_zero_point only where the inputs are affine, None: 0. The codes must lie within the spec's limits.
    ->         [..., N] (two codes a byte: [..., ceil(N / 2)]). A row of x that holds NaN or infinity gives a row of NaN
               when quantised dynamically.
    On a CPU x may also be int32 [..., N], accumulators, be they sums of those of several buffers (of parts of K), where
    out_dtype is given: the epilogue follows, with x_scale where inputs are dynamic.
    Raises ArgumentError, UnsupportedError. Source: docs/numerics.md 2-5.

    Example:
        >>> from pyquant.ops import LinearSpec, layout_for
        >>> spec = LinearSpec(1, 2, layout=layout_for(torch.device("cpu"))).to_ints()
        >>> packed = pack_linear(torch.tensor([[3, 4]], dtype=torch.int8), torch.ones(1), spec)
        >>> x, scale = torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([0.5])
        >>> sums = qlinear(x, packed, None, spec, torch.int32, scale)
        >>> sums.item(), qlinear(sums, packed, None, spec, torch.float32, scale).item()
        (11, 5.5)
    """
    return call(_ops.qlinear.default, x, packed, residual, _words(spec), out_dtype, x_scale, x_zero_point)


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
    """W8A16 and W4A16: float activations times dequantised integer weights, the same epilogue, float accumulation.

    x    float [..., K].   w   int8 [N, K] or uint8 [N, ceil(K / 2)] (w_bits 4).
    w_scale, w_zero_point   float32 and int32, [N] or [N, K / group_size].
    ->   out_dtype (x.dtype when None) [..., N]; differentiable in x, bias and residual.
    Raises ArgumentError, NonFiniteError. Source: docs/numerics.md 8 (outside the exact contract; tolerance there).

    Example:
        >>> w = torch.tensor([[2, 4]], dtype=torch.int8)
        >>> weight_only_linear(torch.ones(1, 2), w, torch.tensor([0.5])).tolist()
        [[3.0]]
    """
    values.scale_values("w_scale", w_scale)
    fused = (bias, residual, w_bits, group_size, activation, clamp_min, clamp_max, out_dtype)
    return call(_ops.weight_only_linear.default, x, w, w_scale, w_zero_point, *fused)


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
    """The 16-bit (or float32) layer with the same epilogue as the integer ones: an equal citizen of every plan.

    x    float [..., K].   w   float [N, K].   bias   float32 [N].   residual   float [..., N].
    ->   out_dtype (x.dtype when None) [..., N]; differentiable in x, w, bias and residual.
    Raises ArgumentError. Source: docs/numerics.md 8.

    Example:
        >>> float_linear(torch.ones(1, 2), torch.tensor([[1.0, -3.0]]), activation="relu").tolist()
        [[0.0]]
    """
    return call(_ops.float_linear.default, x, w, bias, residual, activation, clamp_min, clamp_max, out_dtype)
