"""What a QLinear must give, from the executable specification alone: no op, no packed buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pyquant import numerics
from pyquant.core.qtensor import PackedQTensor, QTensor
from pyquant.core.scheme import TensorScheme

if TYPE_CHECKING:
    from pyquant.nn.qconv import QConv2d
    from pyquant.nn.qlinear import QLinear


def forward(layer: QLinear, x: Tensor | QTensor, residual: Tensor | None) -> Any:
    """The result of layer(x, residual), by pyquant.numerics; codes one a byte."""
    if isinstance(x, PackedQTensor):
        x = QTensor(numerics.unpack_int4(x.data, 2 * x.data.shape[-1]), x.scale, x.zero_point)
    scheme, w = layer.scheme, layer.scheme.weights
    group_size = w.group_size or 0
    fused: dict[str, Any] = {
        "activation": layer.activation, "clamp_min": layer.clamp[0], "clamp_max": layer.clamp[1], "residual": residual,
    }  # fmt: skip
    if isinstance(x, Tensor) and scheme.is_float:
        weight = layer.codes
        return numerics.float_linear(x.to(weight.dtype), weight, layer.bias_, out_dtype=x.dtype, **fused)
    if isinstance(x, Tensor) and scheme.is_weight_only:
        weight = numerics.pack(layer.codes, w.code_type)
        return numerics.weight_only_linear(
            x,
            weight,
            layer.weight_scale,
            layer.weight_zero_point,
            layer.bias_,
            w_bits=w.bits,
            group_size=group_size,
            **fused,
        )
    qmin, qmax = (-127, 127) if scheme.outputs is None else scheme.outputs.code_range
    outputs: dict[str, Any] = {
        "out_scale": layer.output_scale, "out_zero_point": layer.output_zero_point, "out_qmin": qmin, "out_qmax": qmax,
    }  # fmt: skip
    if isinstance(x, QTensor):
        y = numerics.gemm(
            x.data, layer.codes, layer.weight_scale, x.scale, x.zero_point, layer.bias_, group_size=group_size,
            out_dtype=torch.int8 if scheme.outputs is not None else layer.dtype, **outputs, **fused,
        )  # fmt: skip
    else:
        inputs = scheme.inputs
        x_qmin, x_qmax = (-127, 127) if inputs is None else inputs.code_range
        y = numerics.qlinear_reference(
            x, layer.codes, layer.weight_scale, bias=layer.bias_, x_scale=layer.input_scale,
            x_zero_point=layer.input_zero_point, x_qmin=x_qmin, x_qmax=x_qmax,
            x_symmetric=inputs is None or inputs.symmetric, group_size=group_size, **outputs, **fused,
        )  # fmt: skip
    return y if layer.output_scale is None else QTensor(y, layer.output_scale, layer.output_zero_point)


def convolution(layer: QConv2d, x: Tensor | QTensor, residual: Tensor | None) -> Any:
    """The result of layer(x, residual): torch's unfold in float64 instead of our gather, then pyquant.numerics."""
    scheme, w, p, dtype = layer.scheme, layer.scheme.weights, layer.patches, layer.dtype
    image = (x if isinstance(x, Tensor) else x.data).double()
    is_batch = image.dim() == 4
    image = image if is_batch else image.unsqueeze(0)
    scale, zero_point = torch.ones(1), None
    if isinstance(x, Tensor):
        dtype = x.dtype
    if scheme.inputs is not None:
        image, scale, zero_point = _image_codes(layer, x, image)
    pad = (p.padding[2], p.padding[3], p.padding[0], p.padding[1])
    zeros = 0.0 if zero_point is None else zero_point.double().reshape(-1, 1, 1, 1)
    image = F.pad(image - zeros, pad) + zeros  # the padding is real zero
    size = (image.shape[0], *p.out_size(image.shape[2] - pad[2] - pad[3], image.shape[3] - pad[0] - pad[1]))
    columns = F.unfold(image, p.kernel_size, p.dilation, 0, p.stride)  # [B, C * pixels, L], channels first
    columns = columns.reshape(size[0], layer.in_channels, p.pixels, size[1] * size[2])
    rows = columns.permute(0, 3, 2, 1).reshape(size[0] * size[1] * size[2], layer.in_features)
    fused: dict[str, Any] = {
        "activation": layer.activation, "clamp_min": layer.clamp[0], "clamp_max": layer.clamp[1],
        "residual": None if residual is None else residual.reshape(-1, layer.out_channels, size[1] * size[2])
        .transpose(1, 2).reshape(-1, layer.out_channels),
    }  # fmt: skip
    if scheme.is_float:
        weight = layer.codes
        y = numerics.float_linear(rows.to(weight.dtype), weight, layer.bias_, out_dtype=dtype, **fused)
    elif scheme.is_weight_only:
        weight = numerics.pack(layer.codes, w.code_type)
        y = numerics.weight_only_linear(
            rows.to(dtype), weight, layer.weight_scale, layer.weight_zero_point, layer.bias_, w_bits=w.bits,
            group_size=w.group_size or 0, **fused,
        )  # fmt: skip
    else:
        qmin, qmax = (-127, 127) if scheme.outputs is None else scheme.outputs.code_range
        if scheme.is_static:
            scale, zero_point = scale.reshape(()), None if zero_point is None else zero_point.reshape(())
        else:
            scale = scale.expand(size[0]).repeat_interleave(size[1] * size[2])
            if zero_point is not None:
                zero_point = zero_point.expand(size[0]).repeat_interleave(size[1] * size[2])
        y = numerics.gemm(
            rows.to(torch.int64), layer.codes, layer.weight_scale, scale, zero_point, layer.bias_,
            group_size=w.group_size or 0, out_dtype=torch.int8 if scheme.outputs is not None else dtype,
            out_scale=layer.output_scale, out_zero_point=layer.output_zero_point, out_qmin=qmin, out_qmax=qmax, **fused,
        )  # fmt: skip
    y = y.reshape(size[0], size[1], size[2], layer.out_channels).permute(0, 3, 1, 2).contiguous()
    y = y if is_batch else y.squeeze(0)
    return y if layer.output_scale is None else QTensor(y, layer.output_scale, layer.output_zero_point)


def _image_codes(layer: QConv2d, x: Tensor | QTensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """float64 codes [B, C, H, W] with scale and zero point, as signed 8-bit codes count them."""
    inputs = cast(TensorScheme, layer.scheme.inputs)
    if isinstance(x, QTensor):
        if x.data.dtype != torch.uint8:
            return image, x.scale, x.zero_point
        zero_point = torch.zeros_like(x.scale, dtype=torch.int32) if x.zero_point is None else x.zero_point
        return image - 128, x.scale, zero_point - 128
    real = x.reshape(image.shape)
    if not inputs.dynamic:
        scale, one = cast(Tensor, layer.input_scale), layer.input_zero_point
        codes = numerics.quantize(real, scale, one, "per_tensor", 0, *inputs.code_range)
        return codes.double(), scale, one
    flat = real.reshape(real.shape[0], layer.in_channels * real.shape[2] * real.shape[3])
    codes, scales, zeros = numerics.quantize_dynamic(flat, "per_token", 0, inputs.symmetric, *inputs.code_range)
    return codes.reshape(image.shape).double(), scales, None if inputs.symmetric else zeros
