"""dequantize_: quantised layers of a model become float ones again, in place, all of them or none."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles
from pyquant.nn.chain import Dequantize, QResidual, Quantize, Residual
from pyquant.nn.forms import restored
from pyquant.nn.fuse import fused_activations, held
from pyquant.nn.linear_call import LinearCall
from pyquant.nn.origin import has_origin
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.swap import Undo, swap_modules
from pyquant.numerics.activation import ACTIVATIONS

# Markers of a chain of codes and what stands there in a float model.
_MARKERS: Final[dict[type[nn.Module], type[nn.Module]]] = {
    QResidual: Residual, Quantize: nn.Identity, Dequantize: nn.Identity,
}  # fmt: skip


def dequantize_(model: nn.Module) -> nn.Module:
    """Replace the quantised layers of a model by float ones with the weights that their codes stand for, in place.

    model  nn.Module that contains QLinear, QConv2d or QEmbedding layers (not itself one: that has `to_float`).
    ->     the model: nn.Linear, nn.Conv2d and nn.Embedding with scale * (code - zero_point) in each layer's own type,
           and its bias; activations that fuse_ had moved are modules again; shared layers stay shared, and an embedding
           and a projection of equal weights share them. Hooks and training flags are kept, devices too.
           Every module is of its former class again: subclasses, and what quantize_ or load_pretrained had rewritten
           (Conv1D, attention, LSTM), where register_linear_form says how; what expose_linears_ had, stays.
    What rounding took is not brought back: the inputs are quantised no more, the weights are those of the codes.
    Transactional: on any exception the model is as before.
    Raises ArgumentError for a model without quantised layers, and for a layer that still lacks its numbers.

    Example:
        >>> import torch
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> from pyquant import quantize_
        >>> model = dequantize_(quantize_(nn.Sequential(nn.Linear(8, 8), nn.GELU()), W8A8Dynamic()))
        >>> type(model[0]).__name__, model[0].weight.dtype
        ('Linear', torch.float32)
    """
    arguments.module("model", model)
    if _is_quantised(model):
        raise ArgumentError("model", f"a {type(model).__name__} itself", "a module that contains layers; use to_float")
    names: dict[int, list[str]] = {}
    layers: dict[int, nn.Module] = {}
    inside = ""
    for name, module in model.named_modules(remove_duplicate=False):
        if inside and name.startswith(inside):
            continue
        inside = ""
        if _is_quantised(module) or type(module) in _MARKERS:
            names.setdefault(id(module), []).append(name)
            layers[id(module)] = module
            inside = f"{name}."
    if not any(_is_quantised(layer) for layer in layers.values()):
        raise ArgumentError("model", f"a {type(model).__name__} without quantised layers", "one that quantize_ changed")
    fused = fused_activations(model)
    new = [(names[key], _float(layer, names[key], fused)) for key, layer in layers.items()]
    _tie([module for _, module in new])
    undo: list[Undo] = []
    try:
        swap_modules(model, new, undo=undo)
        swap_modules(model, _rewritten(model), undo=undo)
        for name, path in fused.items():
            parent_name, _, child = path.rpartition(".")
            _put(model.get_submodule(parent_name), child, _activation(_layer_of(layers, names, name)), undo)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    return model


def _is_quantised(module: nn.Module) -> bool:
    return isinstance(module, (LinearCall, QEmbedding))


def _rewritten(model: nn.Module) -> list[tuple[list[str], nn.Module]]:
    """Modules that quantize_ had rewritten as Linears, with all their names, and what stands there now."""
    layers: dict[int, tuple[list[str], nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and has_origin(module) and not _is_quantised(module):
            layers.setdefault(id(module), ([], module))[0].append(name)
    return [(names, restored(module, module)) for names, module in layers.values()]


def _layer_of(layers: dict[int, nn.Module], names: dict[int, list[str]], name: str) -> Any:
    return next(layers[key] for key, found in names.items() if name in found)


def _float(layer: nn.Module, names: list[str], fused: dict[str, str]) -> nn.Module:
    if type(layer) in _MARKERS:
        return _MARKERS[type(layer)]().train(layer.training)
    if isinstance(layer, LinearCall) and layer.missing is not None:
        raise ArgumentError("model", f"layer '{names[0]}' without {layer.missing}", "layers with all their numbers")
    module: nn.Module = restored(layer.to_float(), layer)  # type: ignore[operator]
    if isinstance(layer, LinearCall) and layer.activation != "none" and names[0] not in fused:
        module = nn.Sequential(module, _activation(layer))  # its own, not one that fuse_ moved
    obstacles.carry_hooks(layer, module)
    return module.train(layer.training)


def _activation(layer: LinearCall) -> nn.Module:
    activation = ACTIVATIONS[layer.activation]
    return activation.module(*activation.limits(*layer.clamp)).train(layer.training)


def _tie(modules: list[nn.Module]) -> None:
    """One parameter for an embedding and the projection of equal weights: they were tied before they were quantised."""
    for embedding in [m for m in modules if isinstance(m, nn.Embedding)]:
        for linear in [m for m in modules if isinstance(m, nn.Linear)]:
            same = (embedding.weight.shape, embedding.weight.dtype) == (linear.weight.shape, linear.weight.dtype)
            if same and bool(embedding.weight.any()) and torch.equal(embedding.weight, linear.weight):
                linear.weight = embedding.weight


def _put(parent: nn.Module, name: str, module: nn.Module, undo: list[Undo]) -> None:
    holder: dict[str, Any] = parent._modules if name in parent._modules else parent.__dict__
    undo.append(partial(holder.__setitem__, name, held(parent, name)))
    holder[name] = module
