"""The ops as typed Python functions: the same arguments, our errors, values of scales checked.

Shapes: x [..., K], weights [N, K], results [..., N]. Formulas and rounding: docs/numerics.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.ops import values
from pyquant.ops.translate import call

_ops = torch.ops.pyquant


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    qmin: int = -127,
    qmax: int = 127,
) -> Tensor:
    """Codes of `x` under given scales: clamp(rint(x * (1 / scale)) + zero_point, qmin, qmax).

    x            float32, float16 or bfloat16, any shape (per_tensor) or [..., K].
    scale        float32, > 0: [1] or [] (per_tensor), x.shape[:-1] (per_token, per_channel) or
                 x.shape[:-1] + [K / group_size] (per_group).
    zero_point   int32, shape of scale, or None for 0.
    ->           int8, shape of x. Infinity saturates, NaN becomes zero_point (set_checks(True) raises instead).
    Raises ArgumentError naming the argument; NonFiniteError for a scale that is not finite and positive.
    Source: docs/numerics.md 2.2.

    Example:
        >>> quantize(torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.01])).tolist()
        [50, -100, 127]
    """
    values.scale_values("scale", scale)
    values.finite_values("x", x)
    return call(_ops.quantize.default, x, scale, zero_point, granularity, group_size, qmin, qmax)


def quantize_dynamic(
    x: Tensor,
    granularity: str = "per_token",
    group_size: int = 0,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points from the data itself.

    x            float32, float16 or bfloat16 [..., K].
    ->           codes int8 like x; scale float32 and zero_point int32: [1] (per_tensor), x.shape[:-1] (per_token,
                 per_channel) or x.shape[:-1] + [K / group_size]. A row holding NaN or infinity gets a NaN scale.
    Raises ArgumentError. Source: docs/numerics.md 2.1, 2.2.

    Example:
        >>> q, scale, zero_point = quantize_dynamic(torch.tensor([[1.27, -0.5]]))
        >>> q.tolist(), zero_point.tolist()
        ([[127, -50]], [0])
    """
    return call(_ops.quantize_dynamic.default, x, granularity, group_size, symmetric, qmin, qmax)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes per token of RMSNorm(x): x / sqrt(mean(x^2) + eps) * weight, quantised without rounding to 16 bits before.

    x            float32, float16 or bfloat16 [..., K].     weight   the same types [K], or None.
    ->           codes int8 [..., K]; scale float32 and zero_point int32, x.shape[:-1]. A row holding NaN or infinity
                 gets a NaN scale. The same bits on every device; codes and scale have no derivative.
    Raises ArgumentError. Source: docs/numerics.md 9.

    Example:
        >>> q, scale, zero_point = rms_norm_quantize(torch.tensor([[3.0, -3.0]]), torch.tensor([1.0, 0.5]))
        >>> q.tolist()
        [[127, -63]]
    """
    return call(_ops.rms_norm_quantize.default, x, weight, eps, symmetric, qmin, qmax)


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes per token of LayerNorm(x), quantised without rounding to 16 bits before.

    x              float32, float16 or bfloat16 [..., K].     weight, bias   the same types [K], or None.
    ->             as rms_norm_quantize.
    Raises ArgumentError. Source: docs/numerics.md 9.

    Example:
        >>> layer_norm_quantize(torch.tensor([[1.0, 5.0]]))[0].tolist()
        [[-127, 127]]
    """
    return call(_ops.layer_norm_quantize.default, x, weight, bias, eps, symmetric, qmin, qmax)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rms_norm_quantize of x + residual, which is returned too.

    residual     dtype and shape of x.
    ->           codes, scale, zero_point as rms_norm_quantize; sum = x + residual, dtype and shape of x: what the norm
                 reads, and differentiable.
    Raises ArgumentError. Source: docs/numerics.md 9.

    Example:
        >>> add_rms_norm_quantize(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0]]))[3].tolist()
        [[2.0, 3.0]]
    """
    return call(_ops.add_rms_norm_quantize.default, x, residual, weight, eps, symmetric, qmin, qmax)


def add_layer_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """layer_norm_quantize of x + residual, which is returned too.

    residual     dtype and shape of x.
    ->           codes, scale, zero_point and sum as add_rms_norm_quantize.
    Raises ArgumentError. Source: docs/numerics.md 9.

    Example:
        >>> add_layer_norm_quantize(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0]]))[3].tolist()
        [[2.0, 3.0]]
    """
    return call(_ops.add_layer_norm_quantize.default, x, residual, weight, bias, eps, symmetric, qmin, qmax)


def silu_mul_quantize(
    x: Tensor, symmetric: bool = True, qmin: int = -127, qmax: int = 127
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes per token of silu(gate) * up, quantised without rounding to 16 bits before.

    x            float32, float16 or bfloat16 [..., 2K]: gates, then ups.
    ->           codes int8 [..., K]; scale float32 and zero_point int32, x.shape[:-1].
    Raises ArgumentError. Source: docs/numerics.md 9.

    Example:
        >>> silu_mul_quantize(torch.tensor([[100.0, 50.0, 2.0, -4.0]]))[0].tolist()
        [[127, -127]]
    """
    return call(_ops.silu_mul_quantize.default, x, symmetric, qmin, qmax)


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
    """Codes per token of activation(x) * up, quantised without rounding to 16 bits before: a gated feed-forward layer
    between its first two products and its last one.

    x            float32, float16 or bfloat16 [..., K]: the gates.
    up           dtype and shape of x.
    activation   one of ACTIVATIONS; clamp_min and clamp_max are the limits of 'clamp'.
    ->           codes int8 [..., K]; scale float32 and zero_point int32, x.shape[:-1].
    Raises ArgumentError. Source: docs/numerics.md 9.

    Example:
        >>> activation_mul_quantize(torch.tensor([[100.0, -50.0]]), torch.tensor([[2.0, -4.0]]), "relu")[0].tolist()
        [[127, 0]]
    """
    limits = (symmetric, qmin, qmax)
    return call(_ops.activation_mul_quantize.default, x, up, activation, clamp_min, clamp_max, *limits)


def hadamard_transform(x: Tensor, block: int, scale: float | None = None) -> Tensor:
    """Every `block` neighbours of a row times a Hadamard matrix whose columns have signs of their own, times a scale.

    x            float32, float16 or bfloat16 [..., K].
    block        m * 2^k that divides K, with m one of 1, 12, 20, 28.
    scale        what the sums are multiplied by, in float32; None: 1 / sqrt(block), an orthogonal map.
    ->           shape and dtype of x: sums in float32, rounded once. Differentiable.
    Raises ArgumentError. Source: docs/numerics.md 15; QuaRot, arXiv 2404.00456.

    Example:
        >>> hadamard_transform(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 4).tolist()
        [[1.0, 3.0, 2.0, -4.0]]
    """
    return call(_ops.hadamard_transform.default, x, block, scale)


def hadamard_quantize(
    x: Tensor, block: int, symmetric: bool = True, qmin: int = -127, qmax: int = 127, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes per token of hadamard_transform, quantised without rounding to 16 bits before.

    x, block     as in hadamard_transform.
    scale        as there; a power of two costs nothing.
    ->           codes int8 [..., K]; scale float32 and zero_point int32, x.shape[:-1].
    Raises ArgumentError. Source: docs/numerics.md 15.

    Example:
        >>> hadamard_quantize(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 4)[0].tolist()
        [[32, 95, 64, -127]]
    """
    return call(_ops.hadamard_quantize.default, x, block, symmetric, qmin, qmax, scale)


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Real values of codes: scale * (q - zero_point), in float32, rounded once more to `out_dtype`.

    q            int8 or uint8, any shape (per_tensor) or [..., K]; scale and zero_point as in quantize.
    ->           out_dtype (float32, float16, bfloat16), shape of q.
    Raises ArgumentError; NonFiniteError for a scale <= 0 (NaN is passed on: it marks a poisoned row).
    Source: docs/numerics.md 2.3.

    Example:
        >>> dequantize(torch.tensor([50], dtype=torch.int8), torch.tensor([0.5])).tolist()
        [25.0]
    """
    values.scale_values("scale", scale, allow_nan=True)
    return call(_ops.dequantize.default, q, scale, zero_point, granularity, group_size, out_dtype)


def magnitude_histogram(x: Tensor, exponent: int) -> Tensor:
    """Counts of |x| per floating bin of the 20 octaves below 2^exponent, negative and positive numbers apart.

    x         float32, float16 or bfloat16, any shape.
    exponent  -100 to 128; numerics.magnitude_exponent(amax) is the one that covers all of x.
    ->        int64 [2, 20481] on the device of x: row 0 numbers whose sign bit is set, row 1 the others. Bin 0 holds
              what is below the window, the last bin also what is above it, infinities and NaN.
    Raises ArgumentError. Source: docs/numerics.md 14.

    Example:
        >>> magnitude_histogram(torch.tensor([0.0, 1.5, -1.5]), 1).sum(1).tolist()
        [1, 2]
    """
    return call(_ops.magnitude_histogram.default, x, exponent)


def pack_int4(q: Tensor) -> Tensor:
    """Two 4-bit codes a byte: int8 [..., K] in [-8, 7] -> uint8 [..., ceil(K / 2)], the even index in the low nibble.

    Raises ArgumentError, also for codes outside [-8, 7] on the CPU. Source: docs/numerics.md 1.

    Example:
        >>> pack_int4(torch.tensor([1, -1], dtype=torch.int8)).tolist()
        [241]
    """
    values.int4_codes("q", q)
    return call(_ops.pack_int4.default, q)


def unpack_int4(packed: Tensor, k: int) -> Tensor:
    """The inverse of pack_int4: uint8 [..., ceil(k / 2)] -> int8 [..., k].

    Raises ArgumentError when k does not fit the last dimension.

    Example:
        >>> unpack_int4(torch.tensor([241], dtype=torch.uint8), 2).tolist()
        [1, -1]
    """
    return call(_ops.unpack_int4.default, packed, k)
