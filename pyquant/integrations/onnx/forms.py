"""Layers as modules of plain tensors whose forward is the graph that is exported.

Each takes and gives real numbers: codes between layers are QuantizeLinear and DequantizeLinear side by side, which the
runtimes fuse. `codes` is the constant by which a layer is found again in a runtime's own graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant import numerics
from pyquant.core.scheme import TensorScheme
from pyquant.integrations.onnx import operators
from pyquant.integrations.onnx.stand_in import StandIn
from pyquant.numerics.activation import ACTIVATIONS
from pyquant.numerics.hadamard import hadamard_transform


class Range(nn.Module):
    """A static range: real numbers become those that its codes stand for."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: Tensor, zero_point: Tensor | None) -> None:
        super().__init__()
        none = torch.zeros((), dtype=torch.int8, device=scale.device)
        zero = none if zero_point is None else zero_point.reshape(()).to(torch.int8)
        self.register_buffer("scale", scale.detach().reshape(()).clone())
        self.register_buffer("zero_point", zero)

    def forward(self, x: Tensor) -> Tensor:
        return operators.quantize_dequantize(x.to(torch.float32), self.scale, self.zero_point).to(x.dtype)


class Cast(nn.Module):
    """What stands where codes became real numbers of a type: they are real already."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Form(StandIn):
    """y = activation(product(x) + bias) + residual, rounded to the layer's own codes where it gives codes."""

    codes: Tensor
    bias: Tensor | None

    def __init__(self, layer: Any, codes: Tensor, bias_shape: tuple[int, ...] = (-1,)) -> None:
        super().__init__()
        self.register_buffer("codes", codes.detach().contiguous())
        bias = layer.bias_
        self.register_buffer("bias", None if bias is None else bias.detach().reshape(bias_shape).clone())
        self.activation, self.clamp = layer.activation, layer.clamp
        self.outputs = None if layer.output_scale_ is None else Range(layer.output_scale_, layer.output_zero_point_)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self.is_called = True
        t = self.product(x.to(torch.float32))
        activation = ACTIVATIONS[self.activation]
        t = activation.plain(t, *activation.limits(*self.clamp))
        if residual is not None:
            t = t + residual.to(torch.float32)
        return t.to(x.dtype) if self.outputs is None else self.outputs(t)

    def product(self, x: Tensor) -> Tensor:
        """float32 x -> float32, the bias added."""
        raise NotImplementedError

    def plus_bias(self, t: Tensor) -> Tensor:
        return t if self.bias is None else t + self.bias


class InputCodes(nn.Module):
    """The quantiser of a layer, in torch: the codes of pyquant.numerics, with scale and zero point.

    dims  over which a dynamic range is taken: a row's, or all of an image but its batch.
    """

    scale: Tensor
    zero_point: Tensor | None

    def __init__(self, layer: Any, dims: tuple[int, ...]) -> None:
        super().__init__()
        inputs: TensorScheme = layer.scheme.inputs
        self.dims, self.symmetric, self.dynamic = dims, inputs.symmetric, inputs.dynamic
        self.qmin, self.qmax = inputs.code_range
        for name in ("scale", "zero_point"):
            one = None if inputs.dynamic else getattr(layer, f"input_{name}")
            self.register_buffer(name, None if one is None else one.detach().reshape(()).clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """float32 -> whole numbers in float32, scale, zero point or None."""
        scale, zero_point = self._range(x) if self.dynamic else (self.scale, self.zero_point)
        v = torch.round(x * numerics.scale_recip(scale))
        if zero_point is None:
            return v.clamp(self.qmin, self.qmax), scale, None
        zero = zero_point.to(torch.float32)
        return torch.minimum(torch.maximum(v, self.qmin - zero), self.qmax - zero) + zero, scale, zero_point

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        size = x.abs()
        total = size.sum(self.dims, keepdim=True)  # NaN where one is: the maximum of onnxruntime passes over it
        if self.symmetric:
            amax = torch.where(total.isnan(), total, size.amax(self.dims, keepdim=True))
            return numerics.scale_from_amax(amax, self.qmax), None
        low, high = x.amin(self.dims, keepdim=True), x.amax(self.dims, keepdim=True)
        high = torch.where(total.isnan(), total, high)
        return numerics.qparams_from_range(low, high, self.qmin, self.qmax)


class IntegerLinear(Form):
    """MatMulInteger between the layer's own steps, one after the other: the bits of QLinear.

    The accumulator is scaled by the weights' scales first, then by the rows': multiplied with each other first,
    onnxruntime would fuse them and multiply the bias by the row's scale.
    """

    operator = "MatMulInteger"
    scale: Tensor
    sums: Tensor

    def __init__(self, layer: Any, codes: Tensor, weight_scale: Tensor) -> None:
        super().__init__(layer, codes.T)
        self.inputs = InputCodes(layer, (-1,))
        dynamic = layer.scheme.inputs.dynamic
        self.register_buffer("scale", weight_scale.clone() if dynamic else layer.input_scale_ * weight_scale)
        sums = None if layer.scheme.inputs.symmetric else codes.sum(1, dtype=torch.int32)
        self.register_buffer("sums", sums)

    def product(self, x: Tensor) -> Tensor:
        v, scale, zero_point = self.inputs(x)
        acc = operators.matmul_integer(v.to(torch.int8), self.codes)
        if zero_point is not None:
            acc = acc - zero_point * self.sums
        t = acc.to(torch.float32) * self.scale
        return self.plus_bias(t * scale if self.inputs.dynamic else t)


class GemmLinear(Form):
    """Q/DQ around Gemm in the one form that onnxruntime makes QGemm of: rows, explicit zero points, an int32 bias."""

    operator = "Q/DQ Gemm"
    scale: Tensor
    zero_points: Tensor
    bias: Tensor
    bias_scale: Tensor
    bias_zero_points: Tensor

    def __init__(self, layer: Any, codes: Tensor, weight_scale: Tensor) -> None:
        super().__init__(layer, codes.T)
        scale = layer.input_scale_ * weight_scale
        self.inputs = Range(layer.input_scale_, layer.input_zero_point_)
        self.register_buffer("scale", weight_scale.clone())
        self.register_buffer("zero_points", torch.zeros(len(scale), dtype=torch.int8, device=scale.device))
        self.register_buffer("bias_scale", scale)
        self.register_buffer("bias_zero_points", torch.zeros(len(scale), dtype=torch.int32, device=scale.device))
        self.bias = whole_bias(layer.bias_, scale)

    def product(self, x: Tensor) -> Tensor:
        rows = self.inputs(x.reshape(-1, x.shape[-1]))  # before the codes: onnxruntime 1.32 cannot turn them round
        w = operators.dequantize(self.codes, self.scale, self.zero_points, axis=1)
        bias = operators.dequantize(self.bias, self.bias_scale, self.bias_zero_points, axis=0)
        return operators.gemm(rows, w, bias).reshape(*x.shape[:-1], self.codes.shape[1])


def whole_bias(bias: Tensor | None, scale: Tensor) -> Tensor:
    """The bias in whole steps of the accumulator, int32 [N]."""
    steps = torch.zeros_like(scale) if bias is None else bias / scale
    return steps.double().round().to(torch.int32)


def fits_whole_bias(layer: Any, weight_scale: Tensor) -> bool:
    """Whether the bias is small enough to be whole steps of the accumulator in int32, with room for the sum."""
    return layer.bias_ is None or bool((layer.bias_ / (layer.input_scale_ * weight_scale)).abs().max() < 2**30)


class DequantizedLinear(Form):
    """Constant codes behind DequantizeLinear, a bias in floating point: what TensorRT looks for.

    inputs  the range of static inputs; None: weight-only.
    bits    4: the codes are stored as INT4 (export.py).
    """

    operator = "Q/DQ MatMul"
    scale: Tensor
    zero_points: Tensor

    def __init__(self, layer: Any, codes: Tensor, weight_scale: Tensor, group_size: int, bits: int) -> None:
        super().__init__(layer, codes.T)
        self.group_size, self.bits = group_size, bits
        self.inputs = None if layer.scheme.inputs is None else Range(layer.input_scale_, layer.input_zero_point_)
        self.operator = "DQ MatMul" if self.inputs is None else self.operator
        scale = weight_scale.T.contiguous() if group_size else weight_scale
        self.register_buffer("scale", scale.clone())
        self.register_buffer("zero_points", torch.zeros(scale.shape, dtype=torch.int8, device=scale.device))

    def product(self, x: Tensor) -> Tensor:
        axis = 0 if self.group_size else 1
        w = operators.dequantize(self.codes, self.scale, self.zero_points, axis, self.group_size)
        if self.inputs is None:
            return self.plus_bias(x @ w)
        rows = self.inputs(x.reshape(-1, x.shape[-1]))  # as GemmLinear has them, for the same reason
        return self.plus_bias(rows @ w).reshape(*x.shape[:-1], self.codes.shape[1])


class NBitsLinear(Form):
    """MatMulNBits: codes as they are packed, activations in floating point."""

    operator = "MatMulNBits"
    scale: Tensor
    zero_points: Tensor | None

    def __init__(self, layer: Any, codes: Tensor, weight_scale: Tensor, block: int) -> None:
        w: TensorScheme = layer.scheme.weights
        n, self.k = codes.shape
        self.bits, self.block = w.bits, block
        blocks = -(-self.k // block)
        group = w.group_size or blocks * block
        middle = 1 << (w.bits - 1)
        padded = F.pad(codes.to(torch.int16) + middle, (0, blocks * block - self.k), value=middle)
        super().__init__(layer, _packed(padded, w.bits).reshape(n, blocks, -1))
        spread = lambda one: one.reshape(n, -1).repeat_interleave(group // block, 1)[:, :blocks]  # noqa: E731
        self.register_buffer("scale", spread(weight_scale).contiguous())
        zero_points = None
        if layer.weight_zero_point_ is not None:
            zeros = spread(layer.weight_zero_point_).to(torch.int16) + middle
            zero_points = _packed(F.pad(zeros, (0, blocks % 2), value=middle) if w.bits == 4 else zeros, w.bits)
        self.register_buffer("zero_points", zero_points)

    def product(self, x: Tensor) -> Tensor:
        return self.plus_bias(
            operators.matmul_nbits(x, self.codes, self.scale, self.zero_points, self.k, self.bits, self.block)
        )


def _packed(unsigned: Tensor, bits: int) -> Tensor:
    """uint8 of codes counted from 0, [N, K]: of 4 bits two a byte, the even column in the low half."""
    if bits == 8:
        return unsigned.to(torch.uint8)
    return (unsigned[:, ::2] | (unsigned[:, 1::2] << 4)).to(torch.uint8)


class FloatLinear(Form):
    """16-bit weights: a product of floating-point numbers, summed in float32."""

    operator = "MatMul"

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, layer.codes)

    def product(self, x: Tensor) -> Tensor:
        return self.plus_bias(F.linear(x.to(self.codes.dtype).to(torch.float32), self.codes.to(torch.float32)))


class TurnedLinear(nn.Module):
    """HadamardLinear: the transform in torch's own sums, whose order is that of the kernels; then the layer inside."""

    def __init__(self, block: int, scale: float | None, linear: nn.Module) -> None:
        super().__init__()
        self.block, self.scale, self.linear = block, scale, linear

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        # a layer that quantises each token does so before its numbers are rounded to the type of x
        wide = x.to(torch.float32) if isinstance(self.linear, IntegerLinear) and self.linear.inputs.dynamic else x
        turned = hadamard_transform(wide, self.block, self.scale)
        y: Tensor = self.linear(turned) if residual is None else self.linear(turned, residual)
        return y.to(x.dtype)


class ResidualAdd(nn.Module):
    """QResidualAdd: the sum is the epilogue's own, before a layer that gives codes rounds to these."""

    def __init__(self, layer: nn.Module, residual: nn.Module, activation: str | None) -> None:
        super().__init__()
        self.layer, self.residual, self.activation = layer, residual, activation

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        skip = self.residual(residual)
        y = self.layer(x, skip) if isinstance(self.layer, Form) else self.layer(x) + skip
        return y if self.activation is None else torch.relu(y)
