"""What layers of a bank of experts have in common, where one call can multiply by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.nn.obstacles import HOOKS, is_watched
from pyquant.nn.qlinear import QLinear
from pyquant.nn.state import held

Kind = tuple[Any, ...]  # (its name, numbers and texts), which compilers can compare
CODES: Final = "codes"  # layers that multiply codes, by their packed buffers
WEIGHT_ONLY: Final = "weight only"
FLOAT: Final = "float"  # QLinears of 16-bit weights
LINEAR: Final = "nn.Linear"


def kind_of(layer: nn.Module) -> Kind | None:
    """The kind of a layer: layers of one kind differ in their numbers alone. None: nothing but its own call will do, as
    it is watched, lacks a number or is of another class."""
    if is_watched(layer):
        return None
    if type(layer) is nn.Linear:
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        if weight is None or type(weight) not in (nn.Parameter, Tensor):
            return None
        return LINEAR, str(weight.dtype), *weight.shape, bias is None
    if type(layer) is not QLinear or layer._waits:
        return None
    if layer._is_direct:
        return CODES, layer._spec
    if layer.missing is not None or layer.scheme.is_integer:
        return None
    sizes = (layer.out_features, layer.in_features, layer.bias_ is None)
    fused = (layer.activation, *layer.clamp)
    w = layer.scheme.weights
    if layer.scheme.is_float:
        return FLOAT, layer.scheme.float_dtype, *sizes, *fused
    return WEIGHT_ONLY, w.bits, w.group_size or 0, layer.weight_zero_point_ is None, *sizes, *fused


# What the kind of a QLinear is made of: attributes, hooks that are empty, and the presence of two numbers.
_attributes = itemgetter(
    "_spec", "scheme", "missing", "_is_direct", "in_features", "out_features", "activation", "clamp"
)
_hooks = itemgetter(*HOOKS)
_may_lack = itemgetter(held("bias"), held("weight_zero_point"))


def by_kind(layers: Sequence[nn.Module]) -> dict[Kind | int, list[int]]:
    """The places of the layers of each kind, in order; a layer without a kind is alone under its own place.

    Banks ask in each call, and a bank of hundreds is mostly of one kind: layers are compared with one before, which
    takes a quarter of the time (a microsecond).
    """
    found: dict[Kind | int, list[int]] = {}
    kind: Kind | None = None
    made_of: Kind | None = None
    is_traced = torch.compiler.is_compiling()  # by a compiler, which knows no itemgetter and does not mind the time
    for place, layer in enumerate(layers):
        own = None if is_traced else _made_of(layer)
        if own is None or own != made_of:
            kind, made_of = kind_of(layer), own
        found.setdefault(place if kind is None else kind, []).append(place)
    return found


def _made_of(layer: nn.Module) -> Kind | None:
    """What says that two layers are of one kind: of a QLinear that nobody watches."""
    own = layer.__dict__
    if type(layer) is not QLinear or "forward" in own or any(_hooks(own)):
        return None
    bias, zero_point = _may_lack(own["_buffers"])
    return _attributes(own), bias is None, zero_point is None


def each(layers: Sequence[Any], name: str) -> list[Tensor]:
    """A number of each layer; [] where such layers have none."""
    return [] if getattr(layers[0], name) is None else [getattr(layer, name) for layer in layers]


def weight_only_operands(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, scales, zero points and biases of layers of one weight-only kind, as the ops for several layers take
    them."""
    packed = [layer._buffers["storage"] for layer in layers]
    return packed, each(layers, "weight_scale_"), each(layers, "weight_zero_point_"), each(layers, "bias_")
