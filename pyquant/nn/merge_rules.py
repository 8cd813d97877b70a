"""Which quantised layers can be one product, and why others cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant import ops
from pyquant.nn import obstacles
from pyquant.nn.merged_linear import MergedLinear, member_kind
from pyquant.nn.qlinear import QLinear


def obstacle(layer: QLinear, places: int) -> str:
    """Why a layer cannot be merged with any other; '' where it can."""
    reasons = {
        "it computes in floating point, where a wider product may round in another order": not _is_exact(layer),
        f"it is a {type(layer).__name__} with a forward of its own": member_kind(layer) is None,
        "it gives codes to the next layer": layer.scheme.outputs is not None,
        "it is not calibrated": layer.missing is not None,
        "it has hooks": obstacles.has_hooks(layer),
        "it stands in several places of the model": places != 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_exact(layer: QLinear) -> bool:
    """Whether a channel has the same bits beside any other channels: integers; codes of weights on a CPU, where the
    compiled library adds each channel up by itself, in one order."""
    if layer.scheme.is_integer or layer.scheme.is_float:
        return layer.scheme.is_integer
    return layer.weight_scale_ is not None and layer.weight_scale_.device.type == "cpu" and ops.native_available()


def difference(one: QLinear, other: QLinear) -> str:
    """Why two layers cannot be one product as they are; '' where they can."""
    groups = [layer._group if isinstance(layer, MergedLinear) else None for layer in (one, other)]
    return unlikeness(one, other) or ("one is merged already" if groups[0] is not groups[1] else "")


def unlikeness(one: QLinear, other: QLinear) -> str:
    """Why two layers cannot be one product, whatever groups they are in; '' where they can."""
    reasons = {
        f"they are called in different ways: {type(one).__name__}, {type(other).__name__}": member_kind(one)
        is not member_kind(other),
        "ranks hold shares of them in different layouts": one._layouts != other._layouts,
        f"their schemes differ: {one.scheme}, {other.scheme}": one.scheme != other.scheme,
        "their inputs have different widths": one.in_features != other.in_features,
        "one has a bias and another none": ("bias" in one.state_slots) != ("bias" in other.state_slots),
        f"their activations differ: {one.activation}, {other.activation}": (one.activation, one.clamp)
        != (other.activation, other.clamp),
        f"their types differ: {one.dtype}, {other.dtype}": one.dtype != other.dtype,
        "they are on different devices": one.weight_scale_.device != other.weight_scale_.device,
        "their static input scales differ": not _same(one.input_scale_, other.input_scale_)
        or not _same(one.input_zero_point_, other.input_zero_point_),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else a.device == b.device and torch.equal(a, b)
