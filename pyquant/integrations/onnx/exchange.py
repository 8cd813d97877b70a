"""Which form a layer takes for a target, why there is none, and a copy of the model that is made of forms."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant import numerics
from pyquant.core.qtensor import QTensor
from pyquant.errors import UnsupportedError
from pyquant.integrations.onnx import convolutions, forms, lookups
from pyquant.integrations.onnx.stand_in import StandIn
from pyquant.nn.chain import Dequantize, QResidual, QResidualAdd, Quantize
from pyquant.nn.experts import QExperts
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.nn.linear_state import LinearState
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.swap import distinct
from pyquant.simulate.insert import convert_

ONNXRUNTIME: Final = "onnxruntime"
TENSORRT: Final = "tensorrt"
TARGETS: Final = (ONNXRUNTIME, TENSORRT)
_BLOCKS: Final = (256, 128, 64, 32, 16)  # of MatMulNBits


def converted(model: nn.Module) -> nn.Module:
    """The model with layers that run in integers for those that simulate them (QAT): a copy where there are any."""
    if any(hasattr(module, "fake_quantizers") for module in model.modules()):
        return convert_(copy.deepcopy(model))
    return model


def exchanged(model: nn.Module, target: str) -> tuple[nn.Module, list[tuple[list[str], Any]]]:
    """A copy of a model in which forms stand for quantised layers, and those layers with all their names.

    The copy shares every parameter and buffer with the model.
    Raises UnsupportedError naming every layer that has no form for this target.
    """
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    layers: list[tuple[list[str], Any]] = []
    refusals: list[str] = []
    for names, module in distinct(model, _is_ours):
        reason = why_not(module, target)
        if reason:
            refusals.append(f"{names[0] or 'model'}: {reason}")
            continue
        memo[id(module)] = form_of(module, target)
        if isinstance(module, LinearState):
            layers.append((names, module))
    if refusals:
        raise UnsupportedError(f"{len(refusals)} layers have no form in ONNX for target {target!r}:", refusals)
    for _, module in reversed(distinct(model, _is_around)):  # from the inside out
        memo[id(module)] = _around(module, memo)
    return copy.deepcopy(model, memo), layers


def _is_around(name: str, module: nn.Module) -> bool:
    return isinstance(module, (HadamardLinear, QResidualAdd))


def _around(module: Any, memo: dict[int, Any]) -> nn.Module:
    """The form of a module around a layer, which asks what the layer is before it calls it."""
    if isinstance(module, HadamardLinear):
        return forms.TurnedLinear(module.block, module.scale, copy.deepcopy(module.linear, memo))
    layer, residual = (copy.deepcopy(part, memo) for part in (module.layer, module.residual))
    return forms.ResidualAdd(layer, residual, module.activation)


def _is_ours(name: str, module: nn.Module) -> bool:
    return isinstance(module, (LinearState, QExperts, Quantize, Dequantize, QResidual))


def why_not(layer: Any, target: str) -> str:
    """Why a layer has no form for a target, and what to do; '' where it has one.

    Example:
        >>> from pyquant import QLinear, W4A8Dynamic
        >>> why_not(QLinear.from_float(nn.Linear(64, 8), W4A8Dynamic(32)), "onnxruntime")[:46]
        'no runtime multiplies 4-bit weights with scale'
    """
    if isinstance(layer, QExperts):
        return "experts have no form in ONNX: dequantize_ them, or export the model without"
    if isinstance(layer, LinearState) and layer.share:
        return f"it is {layer.share}: gather_quantized_ of pyquant.integrations.distributed makes whole layers"
    if isinstance(layer, (Dequantize, QResidual, QEmbedding)):
        return ""
    if isinstance(layer, Quantize):
        return _inputs_why_not(layer.scheme, target)
    if not isinstance(layer, (QLinear, QConv2d)):
        return f"a {type(layer).__name__}; QLinear, QConv2d and QEmbedding have forms"
    if layer.missing is not None:
        return f"it lacks {layer.missing}: calibrate it or load a state_dict"
    scheme = layer.scheme
    if scheme.is_float:
        return ""
    weights = scheme.weights
    if weights.group_size is not None and not weights.two_level and layer.in_features > weights.group_size:
        if scheme.is_integer:
            return (
                f"no runtime multiplies 4-bit weights with scales by groups in integers ({scheme}): "
                "W4A16, W4A8TwoLevel, or one scale a channel (group_size=None) have a form"
            )
        if isinstance(layer, QConv2d):
            return f"convolutions take one scale an output channel, this one has groups of {weights.group_size}"
        if target == ONNXRUNTIME and _block(layer) is None:
            return f"MatMulNBits takes groups that a multiple of 16 divides as a power of two, not {weights.group_size}"
    if isinstance(layer, QConv2d) and not weights.symmetric:
        return "convolutions take symmetric weights"
    if target == TENSORRT and not weights.symmetric:
        return "TensorRT takes symmetric weights (zero points of 0): symmetric=True"
    if (
        isinstance(layer, QConv2d)
        and scheme.inputs is not None
        and scheme.inputs.dynamic
        and not scheme.inputs.symmetric
    ):
        return "ConvInteger takes one zero point, not one an image: symmetric_inputs=True"
    for tensor in (scheme.inputs, scheme.outputs):
        if tensor is not None and (reason := _inputs_why_not(tensor, target)):
            return reason
    return ""


def _inputs_why_not(inputs: Any, target: str) -> str:
    if inputs.bits != 8:
        return f"{inputs.bits}-bit activations: runtimes take 8 bits"
    if target == TENSORRT and inputs.dynamic:
        return "TensorRT has no activations quantised per token: W8A8 with a calibrated range, or W4A16, W8A16"
    if target == TENSORRT and not inputs.symmetric:
        return "TensorRT takes symmetric activations (zero points of 0): symmetric_inputs=True"
    return ""


def form_of(layer: Any, target: str) -> nn.Module:
    """The form of a layer for which why_not says nothing."""
    if isinstance(layer, Dequantize):
        return forms.Cast(layer.dtype)
    if isinstance(layer, Quantize) and layer.scheme.dynamic:
        return nn.Identity()  # the layer that takes the codes quantises each row to the same ones
    if isinstance(layer, (Quantize, QResidual)):
        return forms.Range(layer.scale, layer.zero_point)
    if isinstance(layer, QEmbedding):
        form = (lookups.DequantizedLookup if target == TENSORRT else lookups.Lookup)(layer)
        return lookups.like(layer, form).standing_for(layer)
    make = _conv_form if isinstance(layer, QConv2d) else _linear_form
    return make(layer, target).standing_for(layer).train(layer.training)


def _linear_form(layer: QLinear, target: str) -> StandIn:
    scheme = layer.scheme
    if scheme.is_float:
        return forms.FloatLinear(layer)
    if scheme.is_weight_only:
        if target == TENSORRT:
            group = scheme.weights.group_size or 0  # INT4 constants take scales by blocks alone
            return forms.DequantizedLinear(
                layer, layer.codes, layer.weight_scale_, group, scheme.weights.bits if group else 8
            )
        return forms.NBitsLinear(layer, layer.codes, layer.weight_scale_, _block(layer) or 0)
    codes, scale = _multiplied(layer)
    if target == TENSORRT:
        return forms.DequantizedLinear(layer, codes, scale, 0, 8)
    if scheme.is_static and forms.fits_whole_bias(layer, scale):
        return forms.GemmLinear(layer, codes, scale)
    return forms.IntegerLinear(layer, codes, scale)


def _conv_form(layer: QConv2d, target: str) -> StandIn:
    if layer.scheme.is_float:
        return convolutions.FloatConv(layer)
    codes, scale = _multiplied(layer)
    if target == TENSORRT or layer.scheme.is_weight_only:
        return convolutions.DequantizedConv(layer, codes, scale)
    return convolutions.IntegerConv(layer, codes, scale)


def _multiplied(layer: QLinear | QConv2d) -> tuple[Tensor, Tensor]:
    """int8 codes [N, K] and a scale a row: steps of two levels are multiplied in, 4-bit codes lie one a byte."""
    w, codes, scale = layer.scheme.weights, layer.codes, layer.weight_scale_
    if w.two_level:
        return numerics.one_level(codes, scale, numerics.largest_step(*w.code_range))
    return codes, scale.reshape(len(codes))


def _block(layer: QLinear) -> int | None:
    """The largest block of MatMulNBits that divides the layer's groups."""
    group = layer.scheme.weights.group_size
    if group is None:
        return next((b for b in _BLOCKS[1:] if b <= layer.in_features), 16)
    return next((b for b in _BLOCKS if group % b == 0), None)


def plain(results: list[Any]) -> list[Tensor]:
    """The tensors among a model's results; codes as the real numbers that they stand for, as forms give them."""
    found: list[Tensor] = []
    for one in results:
        if isinstance(one, QTensor):
            found.append(Dequantize()(one))
        elif isinstance(one, torch.Tensor):
            found.append(one)
    return found
