"""What a quantised layer must give, from the executable specification alone: no op, no packed buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pyquant import numerics
from pyquant.core.qtensor import PackedQTensor, QTensor
from pyquant.core.scheme import TensorScheme

if TYPE_CHECKING:
    from pyquant.nn.linear_call import LinearCall
    from pyquant.nn.qconv import QConv2d


def result(layer: Any, x: Tensor | QTensor, residual: Tensor | None) -> Tensor:
    """What layer(x, residual) must give; codes one a byte."""
    return (forward if layer._form.patches is None else convolution)(layer, x, residual)


def forward(layer: LinearCall, x: Tensor | QTensor, residual: Tensor | None) -> Tensor:
    """A QLinear's rows."""
    if isinstance(x, PackedQTensor):
        x = QTensor(numerics.unpack_int4(x.data, 2 * x.data.shape[-1]), x.scale, x.zero_point)
    if isinstance(x, QTensor):
        return _product(layer, x.data, x.scale, x.zero_point, residual, layer.dtype)
    if not layer.scheme.is_integer:
        return _product(layer, x, None, None, residual, x.dtype)
    lead = x.shape[:-1]
    codes, scale, zero_point = _codes(layer, x.reshape(lead.numel(), layer.in_features))
    added = None if residual is None else residual.reshape(lead.numel(), layer.out_features)
    return _product(layer, codes, scale, zero_point, added, x.dtype).reshape(*lead, layer.out_features)


def convolution(layer: QConv2d, x: Tensor | QTensor, residual: Tensor | None) -> Tensor:
    """A QConv2d's image: torch's unfold in float64 instead of our gather."""
    scheme, p = layer.scheme, layer.patches
    image = (x if isinstance(x, Tensor) else x.data).double()
    is_batch = image.dim() == 4
    image = image if is_batch else image.unsqueeze(0)
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    dtype = x.dtype if isinstance(x, Tensor) else layer.dtype
    if scheme.inputs is not None:
        image, scale, zero_point = _image_codes(layer, x, image)
    pad = (p.padding[2], p.padding[3], p.padding[0], p.padding[1])
    zeros = 0.0 if zero_point is None else zero_point.double().reshape(-1, 1, 1, 1)
    image = F.pad(image - zeros, pad) + zeros  # the padding is real zero
    batch, pixels = image.shape[0], p.out_size(image.shape[2] - pad[2] - pad[3], image.shape[3] - pad[0] - pad[1])
    count = pixels[0] * pixels[1]
    columns = F.unfold(image, p.kernel_size, p.dilation, 0, p.stride)  # [B, C * pixels, L], channels first
    columns = columns.reshape(batch, p.groups, layer.in_channels // p.groups, p.pixels, count)
    rows = columns.permute(1, 0, 4, 3, 2).reshape(p.groups, batch * count, layer.in_features)
    if residual is not None:
        residual = residual.reshape(batch, layer.out_channels, count).transpose(1, 2).reshape(-1, layer.out_channels)
    if scheme.is_integer:
        rows = rows.to(torch.int64)
        if not scheme.is_static:
            scale, zero_point = (
                None if one is None else one.expand(batch).repeat_interleave(count) for one in (scale, zero_point)
            )
    each = layer.out_channels // p.groups
    products = []
    for group in range(p.groups):
        own = slice(group * each, (group + 1) * each)
        added = None if residual is None else residual[:, own]
        products.append(_product(layer, rows[group], scale, zero_point, added, dtype, own))
    y = torch.cat(products, 1)
    y = y.reshape(batch, *pixels, layer.out_channels).permute(0, 3, 1, 2).contiguous()
    return y if is_batch else y.squeeze(0)


def _product(
    layer: LinearCall,
    rows: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    own: slice = slice(None),
) -> Tensor:
    """Rows of codes, or of real numbers where the layer multiplies those, through the layer; or its output channels
    `own`."""
    scheme, w, codes = layer.scheme, layer.scheme.weights, layer.codes[own]
    bias, w_scale, w_zero_point = (
        None if v is None else v[own] for v in (layer.bias_, layer.weight_scale_, layer.weight_zero_point_)
    )
    fused: dict[str, Any] = {
        "activation": layer.activation,
        "clamp_min": layer.clamp[0],
        "clamp_max": layer.clamp[1],
        "residual": residual,
    }
    if scheme.is_float:
        return numerics.float_linear(rows.to(codes.dtype), codes, bias, out_dtype=dtype, **fused)
    fused["group_size"] = w.group_size or 0
    if scheme.is_weight_only:
        weight = (numerics.pack(codes, w.code_type), cast(Tensor, w_scale), w_zero_point)
        return numerics.weight_only_linear(rows.to(dtype), *weight, bias, w_bits=w.bits, **fused)
    if scheme.is_static:
        scale, zero_point = (None if one is None else one.reshape(()) for one in (scale, zero_point))
    if w.two_level:
        codes, w_scale = numerics.one_level(codes, cast(Tensor, w_scale), numerics.largest_step(*w.code_range))
        fused["group_size"] = 0
    qmin, qmax = layer._output_range()
    return numerics.gemm(
        rows,
        codes,
        w_scale,
        cast(Tensor, scale),
        zero_point,
        bias,
        out_scale=layer.output_scale_,
        out_zero_point=layer.output_zero_point_,
        out_qmin=qmin,
        out_qmax=qmax,
        out_dtype=dtype if scheme.outputs is None else torch.int8,
        **fused,
    )


def _codes(layer: LinearCall, real: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of real numbers, with scale and zero point: the layer's own, or those of each row."""
    inputs = cast(TensorScheme, layer.scheme.inputs)
    if not inputs.dynamic:
        scale, one = cast(Tensor, layer.input_scale_), layer.input_zero_point_
        return numerics.quantize(real, scale, one, "per_tensor", 0, *inputs.code_range), scale, one
    codes, scales, zeros = numerics.quantize_dynamic(real, "per_token", 0, inputs.symmetric, *inputs.code_range)
    return codes, scales, None if inputs.symmetric else zeros


def _image_codes(layer: QConv2d, x: Tensor | QTensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """float64 codes [B, C, H, W] with scale and zero point, as signed 8-bit codes count them."""
    if isinstance(x, QTensor):
        if x.data.dtype != torch.uint8:
            return image, x.scale, x.zero_point
        zero_point = torch.zeros_like(x.scale, dtype=torch.int32) if x.zero_point is None else x.zero_point
        return image - 128, x.scale, zero_point - 128
    codes, scale, one = _codes(layer, x.reshape(image.shape[0], image.shape[1:].numel()))
    return codes.reshape(image.shape).double(), scale, one
