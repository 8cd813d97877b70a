"""What a QLinear must give, from the executable specification alone: no op, no packed buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyquant import numerics
from pyquant.core.qtensor import QTensor

if TYPE_CHECKING:
    from pyquant.nn.qlinear import QLinear


def forward(layer: QLinear, x: Tensor | QTensor, residual: Tensor | None) -> Any:
    """The result of layer(x, residual), by pyquant.numerics."""
    scheme, w = layer.scheme, layer.scheme.weights
    group_size = w.group_size or 0
    fused: dict[str, Any] = {
        "activation": layer.activation, "clamp_min": layer.clamp[0], "clamp_max": layer.clamp[1], "residual": residual,
    }  # fmt: skip
    if isinstance(x, Tensor) and scheme.is_float:
        weight = layer.weight
        return numerics.float_linear(x.to(weight.dtype), weight, layer.bias, out_dtype=x.dtype, **fused)
    if isinstance(x, Tensor) and scheme.is_weight_only:
        weight = numerics.pack_int4(layer.weight) if w.bits == 4 else layer.weight
        return numerics.weight_only_linear(
            x,
            weight,
            layer.weight_scale,
            layer.weight_zero_point,
            layer.bias,
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
            x.data, layer.weight, layer.weight_scale, x.scale, x.zero_point, layer.bias, group_size=group_size,
            out_dtype=torch.int8 if scheme.outputs is not None else layer.dtype, **outputs, **fused,
        )  # fmt: skip
    else:
        inputs = scheme.inputs
        x_qmin, x_qmax = (-127, 127) if inputs is None else inputs.code_range
        y = numerics.qlinear_reference(
            x, layer.weight, layer.weight_scale, bias=layer.bias, x_scale=layer.input_scale,
            x_zero_point=layer.input_zero_point, x_qmin=x_qmin, x_qmax=x_qmax,
            x_symmetric=inputs is None or inputs.symmetric, group_size=group_size, **outputs, **fused,
        )  # fmt: skip
    return y if layer.output_scale is None else QTensor(y, layer.output_scale, layer.output_zero_point)
