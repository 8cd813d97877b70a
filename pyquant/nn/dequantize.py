"""dequantize_: quantised layers of a model become float ones again, in place, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles
from pyquant.nn.chain import Dequantize, QResidual, Quantize, Residual
from pyquant.nn.forms import restored
from pyquant.nn.fuse import fused_activations, put_activation
from pyquant.nn.gated_feed import GatedFeed, gated_feeds, make_plain
from pyquant.nn.linear_call import LinearCall
from pyquant.nn.linear_state import LinearState
from pyquant.nn.origin import has_origin
from pyquant.nn.swap import distinct, swap_modules
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.nn.whole_layer import WRAPPERS, without
from pyquant.numerics.activation import ACTIVATIONS

# Markers of a chain of codes and what stands there in a float model.
_MARKERS: Final[dict[type[nn.Module], type[nn.Module]]] = {
    QResidual: Residual,
    Quantize: nn.Identity,
    Dequantize: nn.Identity,
}


def dequantize_(model: nn.Module) -> nn.Module:
    """Replace the quantised layers of a model by float ones with the weights that their codes stand for, in place.

    model  nn.Module that contains QLinear, QConv2d or QEmbedding layers (not itself one: that has `to_float`).
    ->     the model: nn.Linear, nn.Conv2d and nn.Embedding with scale * (code - zero_point) in each layer's own type,
           and its bias; activations that fuse_ had moved are modules again; shared layers stay shared, and an embedding
           and a projection of equal weights share them. Hooks, training flags, devices and frozen parameters are kept.
           Every module is of its former class again: subclasses, and what quantize_ or load_pretrained had rewritten
           (Conv1D, attention, LSTM), where register_linear_form says how; what expose_linears_ had, stays. Where
           inputs were transformed or sorted first (HadamardLinear, a checkpoint with `desc_act`), the weight has that,
           also where the layer behind is a float one.
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
    if isinstance(model, LinearState):
        raise ArgumentError("model", f"a {type(model).__name__} itself", "a module that contains layers; use to_float")
    layers = _layers(model)
    wrappers = distinct(model, lambda name, m: bool(name) and isinstance(m, WRAPPERS) and _becomes_float(m.linear))
    if not wrappers and not any(isinstance(layer, LinearState) for _, layer in layers):
        raise ArgumentError("model", f"a {type(model).__name__} without quantised layers", "one that quantize_ changed")
    with undone_on_error() as undo:
        put_floats(model, layers, undo)
        swap_modules(model, [(names, without(m, cast(nn.Module, m.linear))) for names, m in wrappers], undo=undo)
    return model


def _becomes_float(layer: object) -> bool:
    return isinstance(layer, LinearState) or type(layer) is nn.Linear


def put_floats(
    model: nn.Module,
    layers: Sequence[tuple[list[str], Any]],
    undo: list[Undo],
    originals: Mapping[str, nn.Module] = MappingProxyType({}),
) -> None:
    """dequantize_ for some layers, each with all its names; undo receives the steps back.

    originals  float layers by name that go back instead of what the codes stand for.
    """
    fused = fused_activations(model)
    new = [(names, float_of(layer, names, fused, originals.get(names[0]))) for names, layer in layers]
    _tie([module for (names, _), (_, module) in zip(layers, new, strict=True) if names[0] not in originals])
    moved = [(path, layer) for names, layer in layers for name, path in fused.items() if name in names]
    swap_modules(model, new, undo=undo)
    rewritten = distinct(model, lambda name, m: bool(name) and has_origin(m) and not isinstance(m, LinearState))
    swap_modules(model, [(names, restored(module, module)) for names, module in rewritten], undo=undo)
    for feed in gated_feeds(model).values():
        if isinstance(feed, GatedFeed) and not feed.is_ready:  # it may stand under two names
            make_plain(feed, undo)
    for path, layer in moved:
        parent_name, _, child = path.rpartition(".")
        put_activation(model.get_submodule(parent_name), child, _activation(layer), undo)


def _layers(model: nn.Module) -> list[tuple[list[str], Any]]:
    """Quantised layers and markers with their names, but for those inside of others."""
    inside = ""

    def is_outermost(name: str, module: nn.Module) -> bool:
        nonlocal inside
        if inside and name.startswith(inside):
            return False
        is_one = isinstance(module, LinearState) or type(module) in _MARKERS
        inside = f"{name}." if is_one else ""
        return is_one

    return distinct(model, is_outermost)


def float_of(
    layer: nn.Module, names: list[str], fused: Mapping[str, str], original: nn.Module | None = None
) -> nn.Module:
    """The float module that takes the place of a quantised layer: `original`, or what its codes stand for; with an
    activation of its own behind it, unless fuse_ moved that one there (`fused`)."""
    if type(layer) in _MARKERS:
        return _MARKERS[type(layer)]().train(layer.training)
    if isinstance(layer, LinearCall) and layer.missing is not None:
        raise ArgumentError("model", f"layer '{names[0]}' without {layer.missing}", "layers with all their numbers")
    module = restored(layer.to_float(), layer) if original is None else original  # type: ignore[operator]
    if module is not original:
        obstacles.freeze_again(layer, module)
    if isinstance(layer, LinearCall) and layer.activation != "none" and names[0] not in fused:
        module = nn.Sequential(module, _activation(layer))  # its own, not one that fuse_ moved
    if module is not original:  # which has them
        obstacles.carry_hooks(layer, module)
        obstacles.carry_attributes(layer, module)
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
