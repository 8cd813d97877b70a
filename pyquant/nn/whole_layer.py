"""A layer as the model calls it: with the module around it that does something to its inputs first."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final, cast

from torch import nn

from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.nn.obstacles import carry_hooks
from pyquant.nn.reordered import Reordered

WRAPPERS: Final = (HadamardLinear, Reordered)


def wrappers_of(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """{id of a layer: the module that transforms or sorts its inputs and then calls it}."""
    return {id(module.linear): module for module in modules if isinstance(module, WRAPPERS)}


def around(wrapper: nn.Module, layer: nn.Module) -> Any:
    """A wrapper that does the same around another layer; everything else, hooks included, is shared with the first."""
    new = copy.copy(wrapper)
    new.__dict__["_modules"] = {**wrapper._modules, "linear": layer}
    return new


def without(wrapper: nn.Module, real: nn.Module) -> nn.Module:
    """The float module that stands for a wrapper around `real`, at no cost but the layer's.

    real  a Linear, or Sequential of one and its activation; of anything else the wrapper stays around it.
    ->    Linear with the weight that multiplies the wrapper's own inputs, computed in float64 and rounded once.
    """
    if isinstance(real, nn.Sequential):
        linear, *behind = real
        return nn.Sequential(without(wrapper, linear), *behind).train(real.training)
    whole = around(wrapper, real)
    if not isinstance(real, nn.Linear):
        return cast(nn.Module, whole)
    plain = nn.Linear(real.in_features, real.out_features, real.bias is not None, device="meta")
    plain.weight, plain.bias = nn.Parameter(whole.weight, real.weight.requires_grad), real.bias
    carry_hooks(wrapper, plain)
    return plain.train(wrapper.training)
