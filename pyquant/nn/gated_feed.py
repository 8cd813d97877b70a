"""GatedFeed: a feed-forward module whose activation and gate are computed by the quantiser of its last layer."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.core.dtypes import FLOATS
from pyquant.core.remembered import derived
from pyquant.nn import obstacles
from pyquant.nn.fuse_rules import Activation, activation_of
from pyquant.nn.gate_source import Gate, gate_of
from pyquant.nn.linear_call import needs_derivative
from pyquant.nn.merged_linear import MergedLinear
from pyquant.nn.qlinear import QLinear
from pyquant.nn.undo import Undo, put

_quantize = torch.ops.pyquant.activation_mul_quantize.default


class GatedFeed(nn.Module):
    """What fuse_ makes of a module that computes down(activation(gate(x)) * up(x)), in place: a subclass of its class.

    One op, activation_mul_quantize, takes the results of `gate` and `up` and gives the codes that `down` multiplies,
    so that activation and product are computed once in float32, and no tensor of theirs is written. Layers, their
    names and state_dict stay. Where merge_ made gate and up one product, it is computed once and not taken apart.
    The module computes as its class does where it is trained, traced, transformed or watched: where x needs a
    gradient, a layer has hooks or is wrapped by something else, `down` no longer quantises its own rows.
    """

    _gate: Gate
    _curve: Activation
    float_class: type[nn.Module]

    @property
    def is_ready(self) -> bool:
        """Whether all of its layers are quantised still."""
        return all(isinstance(self._modules.get(name), QLinear) for name in self._gate.layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the class that the module had."""
        if len(args) == 1 and not kwargs:
            y = self._by_codes(args[0])
            if y is not None:
                return y
        return super().forward(*args, **kwargs)

    def _by_codes(self, x: object) -> Tensor | None:
        down = self._modules.get(self._gate.down)
        if not isinstance(down, QLinear) or not isinstance(x, Tensor) or x.dim() < 2 or x.dtype not in FLOATS:
            return None
        inputs = down.scheme.inputs
        if inputs is None or not down.takes_tokens or needs_derivative(x, None):
            return None
        gate, up = self._modules.get(self._gate.gate), self._modules.get(self._gate.up or self._gate.gate)
        if not (_gives_numbers(gate) and _gives_numbers(up)) or obstacles.is_watched_value(held(self, self._gate)):
            return None
        a, b = _results(gate, up, x)  # type: ignore[arg-type]
        name, limits = self._curve
        low, high = limits or (0.0, 0.0)
        codes, scale, zero_point = _quantize(a, b, name, low, high, inputs.symmetric, *inputs.code_range)
        return down._multiply_tokens(codes, scale, zero_point, None, a.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class is made at run time: a copy or pickle names the one that it is made of
        parts: tuple[Any, ...] = super().__reduce_ex__(max(2, int(protocol)))  # type: ignore[assignment]
        return (_empty, (self.float_class,), *parts[2:])


def _results(gate: QLinear, up: QLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    if gate is up:
        y, half = gate(x), gate.out_features // 2
        return y.narrow(-1, 0, half), y.narrow(-1, half, half)
    both = gate.with_other(up, x) if isinstance(gate, MergedLinear) and isinstance(up, MergedLinear) else None
    return (gate(x), up(x)) if both is None else both


def _gives_numbers(layer: object) -> bool:
    return isinstance(layer, QLinear) and layer.scheme.outputs is None


def held(parent: nn.Module, gate: Gate) -> Any:
    """The activation of a gated module: what an attribute holds, or the function that its code names."""
    name = gate.activation
    return (parent._modules[name] if name in parent._modules else parent.__dict__.get(name)) if name else gate.function


@derived
def _kind(float_class: type[nn.Module]) -> type[GatedFeed]:
    return type(f"Gated{float_class.__name__}", (GatedFeed, float_class), {"float_class": float_class})


def _empty(float_class: type[nn.Module]) -> GatedFeed:
    kind = _kind(float_class)
    return kind.__new__(kind)


def gated(parent: nn.Module, uses: Counter[int]) -> tuple[Gate, Activation] | None:
    """What makes a module a GatedFeed; None where it computes something else, or its layers are to be left alone.

    uses  {id of a module: in how many places it stands}
    """
    gate = None if isinstance(parent, GatedFeed) else gate_of(parent)
    if gate is None:
        return None
    layers = [parent._modules.get(name) for name in gate.layers]
    activation = held(parent, gate)
    known = activation_of(activation)
    if known is None or obstacles.is_watched_value(activation):
        return None
    for layer in layers:
        if not isinstance(layer, QLinear) or type(layer).forward not in (QLinear.forward, MergedLinear.forward):
            return None
        if uses[id(layer)] != 1 or obstacles.is_watched(layer) or layer.scheme.outputs is not None:
            return None
    *before, down = (layer for layer in layers if isinstance(layer, QLinear))
    if any(layer.activation != "none" for layer in before) or not down.takes_tokens:
        return None
    halves = 1 if gate.up else 2  # of a layer whose results are gates and ups
    return (gate, known) if all(layer.out_features == halves * down.in_features for layer in before) else None


def make_gated(parent: nn.Module, found: tuple[Gate, Activation], undo: list[Undo]) -> None:
    """Make a module a GatedFeed, in place; `undo` receives the steps back."""
    gate, curve = found
    put(parent.__dict__, "_gate", gate, undo)
    put(parent.__dict__, "_curve", curve, undo)
    undo.append(partial(setattr, parent, "__class__", type(parent)))
    parent.__class__ = _kind(type(parent))


def make_plain(parent: GatedFeed, undo: list[Undo]) -> None:
    """Give a GatedFeed the class that it had, in place."""
    undo.append(partial(setattr, parent, "__class__", type(parent)))
    parent.__class__ = parent.float_class  # type: ignore[assignment]
    for name in ("_gate", "_curve"):
        undo.append(partial(parent.__dict__.__setitem__, name, parent.__dict__.pop(name)))


def gated_feeds(model: nn.Module) -> dict[str, GatedFeed]:
    """{name: module} of a model's GatedFeeds, by every name of a shared one."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, GatedFeed)}


def gate_activations(model: nn.Module) -> dict[str, str]:
    """{name of a layer: name of the activation that its quantiser computes}, for the last layers of GatedFeeds."""
    moved = {}
    for name, parent in gated_feeds(model).items():
        start = f"{name}." if name else ""
        moved[f"{start}{parent._gate.down}"] = f"{start}{parent._gate.activation or parent._curve[0]}"
    return moved
