"""QConv2d as modules of plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyquant.core.patches import Patches
from pyquant.integrations.onnx import operators
from pyquant.integrations.onnx.forms import Form, InputCodes, Range


class _Convolution(Form):
    def __init__(self, layer: Any, codes: Tensor) -> None:
        self.patches: Patches = layer.patches
        height, width = self.patches.kernel_size
        super().__init__(layer, codes.reshape(len(codes), height, width, -1).permute(0, 3, 1, 2), (-1, 1, 1))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dim() == 4:
            return super().forward(x, residual)
        return super().forward(x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)).squeeze(0)


class IntegerConv(_Convolution):
    """ConvInteger between the layer's own steps: the bits of QConv2d. onnxruntime takes unsigned codes of images."""

    operator = "ConvInteger"
    scale: Tensor
    zero_point: Tensor

    def __init__(self, layer: Any, codes: Tensor, weight_scale: Tensor) -> None:
        super().__init__(layer, codes)
        self.inputs = InputCodes(layer, (1, 2, 3))
        dynamic = layer.scheme.inputs.dynamic
        scale = weight_scale if dynamic else layer.input_scale_ * weight_scale
        self.register_buffer("scale", scale.reshape(-1, 1, 1).clone())
        zero = 128 if layer.input_zero_point_ is None else 128 + int(layer.input_zero_point_)
        self.register_buffer("zero_point", torch.tensor(zero, dtype=torch.uint8, device=scale.device))

    def product(self, x: Tensor) -> Tensor:
        v, scale, _ = self.inputs(x)
        acc = operators.conv_integer((v + 128).to(torch.uint8), self.codes, self.zero_point, self.patches)
        t = acc.to(torch.float32) * self.scale
        return self.plus_bias(t * scale if self.inputs.dynamic else t)


class DequantizedConv(_Convolution):
    """Constant codes behind DequantizeLinear; `inputs` as in DequantizedLinear."""

    operator = "Q/DQ Conv"
    scale: Tensor
    zero_points: Tensor

    def __init__(self, layer: Any, codes: Tensor, weight_scale: Tensor) -> None:
        super().__init__(layer, codes)
        self.inputs = None if layer.scheme.inputs is None else Range(layer.input_scale_, layer.input_zero_point_)
        self.operator = "DQ Conv" if self.inputs is None else self.operator
        self.register_buffer("scale", weight_scale.clone())
        self.register_buffer(
            "zero_points", torch.zeros(len(weight_scale), dtype=torch.int8, device=weight_scale.device)
        )

    def product(self, x: Tensor) -> Tensor:
        x = x if self.inputs is None else self.inputs(x)
        w = operators.dequantize(self.codes, self.scale, self.zero_points, axis=0)
        return self.plus_bias(operators.conv(x, w, None, self.patches))


class FloatConv(_Convolution):
    """16-bit weights."""

    operator = "Conv"

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, layer.codes)

    def product(self, x: Tensor) -> Tensor:
        real = (x.to(self.codes.dtype).to(torch.float32), self.codes.to(torch.float32))
        return self.plus_bias(operators.conv(*real, None, self.patches))
