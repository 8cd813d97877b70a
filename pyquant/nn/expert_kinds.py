"""What layers of a bank of experts have in common, where one call can multiply by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn

from pyquant.nn.obstacles import is_watched
from pyquant.nn.qlinear import QLinear

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
    return WEIGHT_ONLY, w.bits, w.group_size or 0, layer.weight_zero_point is None, *sizes, *fused


def by_kind(layers: Sequence[nn.Module]) -> dict[Kind | int, list[int]]:
    """The places of the layers of each kind, in order; a layer without a kind is alone under its own place."""
    found: dict[Kind | int, list[int]] = {}
    for place, layer in enumerate(layers):
        kind = kind_of(layer)
        found.setdefault(place if kind is None else kind, []).append(place)
    return found


def each(layers: Sequence[Any], name: str) -> list[Tensor]:
    """A number of each layer; [] where such layers have none."""
    return [] if getattr(layers[0], name) is None else [getattr(layer, name) for layer in layers]


def weight_only_operands(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, scales, zero points and biases of layers of one weight-only kind, as the ops for several layers take
    them."""
    held = [layer._buffers["storage"] for layer in layers]
    return held, each(layers, "weight_scale"), each(layers, "weight_zero_point"), each(layers, "bias_")
