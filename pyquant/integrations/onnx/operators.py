"""ONNX operators that torch has none of, as calls that torch.onnx.export writes down; they compute nothing here."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pyquant.core.patches import Patches

OPSET: Final = 21  # the first with 4-bit codes and scales by blocks
_CODES: Final = torch.int8


def _call(
    name: str, *operands: Tensor, dtype: torch.dtype, shape: Any, version: int = OPSET, **attributes: Any
) -> Tensor:
    return torch.onnx.ops.symbolic(name, operands, attributes, dtype=dtype, shape=shape, version=version)


def quantize_dequantize(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """float32 x as its codes stand for it; runtimes look for this pair. zero_point int8 []: the type of the codes."""
    codes = _call("QuantizeLinear", x, scale, zero_point, dtype=_CODES, shape=x.shape)
    return _call("DequantizeLinear", codes, scale, zero_point, dtype=torch.float32, shape=x.shape)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor, axis: int, block_size: int = 0) -> Tensor:
    """Real numbers of constant codes, one scale an index of `axis`, or every block_size of them."""
    blocks = {"block_size": block_size} if block_size else {}
    return _call(
        "DequantizeLinear", codes, scale, zero_point, dtype=torch.float32, shape=codes.shape, axis=axis, **blocks
    )


def gemm(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """x [M, K] w [K, N] + bias [N]."""
    return _call("Gemm", x, w, bias, dtype=torch.float32, shape=(x.shape[0], w.shape[1]))


def matmul_integer(x: Tensor, w: Tensor) -> Tensor:
    """int32 [..., N] of int8 codes [..., K] and [K, N]."""
    return _call("MatMulInteger", x, w, dtype=torch.int32, shape=(*x.shape[:-1], w.shape[1]))


def matmul_nbits(
    x: Tensor, w: Tensor, scale: Tensor, zero_points: Tensor | None, k: int, bits: int, block: int
) -> Tensor:
    """float32 [..., N] of float32 [..., K] and packed codes: onnxruntime's own operator, its sums in float32."""
    n = w.shape[0]
    operands = (x, w, scale) if zero_points is None else (x, w, scale, zero_points)
    return _call(
        "com.microsoft::MatMulNBits",
        *operands,
        dtype=torch.float32,
        shape=(*x.shape[:-1], n),
        version=1,
        K=k,
        N=n,
        bits=bits,
        block_size=block,
        accuracy_level=1,  # left to itself or set to 4 it may round x to 8 bits, which is another model
    )


def _window(x: Tensor, w: Tensor, p: Patches) -> tuple[dict[str, Any], tuple[Any, ...]]:
    top, bottom, left, right = p.padding
    window = {"kernel_shape": p.kernel_size, "strides": p.stride, "dilations": p.dilation}
    groups = {"group": p.groups} if p.groups > 1 else {}
    size = p.out_size(*x.shape[2:])
    return {**{k: list(v) for k, v in window.items()}, "pads": [top, left, bottom, right], **groups}, (
        x.shape[0],
        w.shape[0],
        *size,
    )


def conv_integer(x: Tensor, w: Tensor, x_zero_point: Tensor, p: Patches) -> Tensor:
    """int32 [B, N, H', W'] of codes [B, C, H, W] and [N, C, h, w]; the padding is x_zero_point."""
    window, shape = _window(x, w, p)
    return _call("ConvInteger", x, w, x_zero_point, dtype=torch.int32, shape=shape, **window)


def conv(x: Tensor, w: Tensor, bias: Tensor | None, p: Patches) -> Tensor:
    """The convolution of real numbers with zeros around the image, which may be more on one side."""
    window, shape = _window(x, w, p)
    operands = (x, w) if bias is None else (x, w, bias)
    return _call("Conv", *operands, dtype=torch.float32, shape=shape, **window)
