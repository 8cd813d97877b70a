"""fuse_: activations that follow quantised layers move into their kernels, in place, all of them or none."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles
from pyquant.nn.fuse_rules import activation_of, pairs_of
from pyquant.nn.gated_feed import gated, make_gated
from pyquant.nn.linear_call import LinearCall
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear
from pyquant.nn.swap import swap_modules, uses_of
from pyquant.nn.undo import Undo, put, undone_on_error

_MOVED = "pyquant_moved"  # what stood where an nn.Identity does


def fuse_(model: nn.Module) -> nn.Module:
    """Let QLinears and QConv2ds compute the GELU, SiLU, ReLU, ReLU6 or Hardtanh that directly follows, in place.

    model  nn.Module with quantised layers: call it after quantize_.
    ->     the model. Each activation that moved is an nn.Identity now; its name is in the QLinear's
           `fused_activation`, in quantization_report, and in what save_pretrained writes.
    Where: neighbours in an nn.Sequential, nn.TransformerEncoderLayer and nn.TransformerDecoderLayer, feed-forward
    classes of transformers (fuse_rules.TRANSFORMERS_PARENTS), and what register_fusion names. Left alone: layers that
    are used in several places, have hooks, an activation already, or integer outputs; activations that the kernels do
    not compute. The activation is then computed in fp32, before the result is rounded to its type.
    A module whose forward reads down(activation(gate(x)) * up(x)), gate and up two layers or halves of one, and whose
    `down` quantises its own rows, becomes a GatedFeed, whoever wrote it: activation and product move into that
    quantiser, and nothing becomes an Identity.
    A BatchNorm is folded before quantising (fold_batch_norm_); until then nothing is fused across it. Codes instead of
    real numbers between layers are link_'s work, after this one.
    Transactional: on any exception the model is as before. Calling it again changes nothing. Code that calls the
    members of an nn.Sequential by itself, not through its forward, is out of sight: do not fuse such a model.
    Raises ArgumentError for a model without quantised layers. Source: docs/numerics.md 4, 6 and 9, docs/activations.md.

    Example:
        >>> import torch
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> from pyquant import quantize_
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        >>> model = fuse_(quantize_(model, W8A8Dynamic()))
        >>> model[0].activation, model[0].fused_activation, model[1]
        ('gelu', '1', Identity())
    """
    arguments.module("model", model)
    if not any(isinstance(module, LinearCall) for module in model.modules()):
        got = f"a {type(model).__name__} without QLinear or QConv2d"
        raise ArgumentError("model", got, "a model with quantised layers: call quantize_ first")
    uses = uses_of(model)
    layers: list[tuple[list[str], nn.Module]] = []
    places: list[tuple[nn.Module, str]] = []
    gates: list[tuple[nn.Module, Any]] = []
    for name, parent in model.named_modules():
        gate = gated(parent, uses)
        if gate is not None:
            gates.append((parent, gate))
            continue
        for linear, activation in pairs_of(parent):
            fused = _fused(parent._modules.get(linear), held(parent, activation), uses)
            if fused is not None:
                fused.fused_activation = activation
                layers.append(([f"{name}.{linear}" if name else linear], fused))
                places.append((parent, activation))
    with undone_on_error() as undo:
        swap_modules(model, layers, undo=undo)
        for parent, activation in places:
            put_identity(parent, activation, undo)
        for parent, gate in gates:
            make_gated(parent, gate, undo)
    return model


def _fused(layer: nn.Module | None, activation: object, uses: Counter[int]) -> LinearCall | None:
    """The layer with the activation in its epilogue; None where the two are to be left alone."""
    known = activation_of(activation)
    if known is None or not isinstance(layer, (QLinear, QConv2d)) or layer.activation != "none" or uses[id(layer)] != 1:
        return None
    forwards = (QLinear.forward, QConv2d.forward)
    has_own_forward = type(layer).forward not in forwards or "forward" in layer.__dict__
    if has_own_forward or layer.scheme.outputs is not None or obstacles.has_hooks(layer):
        return None
    if isinstance(activation, nn.Module) and obstacles.has_hooks(activation):
        return None
    return layer.with_activation(*known)


def held(parent: nn.Module, name: str) -> object:
    """A module or function that the parent itself holds under a name (what its class holds does not count)."""
    return holder_of(parent, name).get(name)


def holder_of(parent: nn.Module, name: str) -> dict[str, Any]:
    """The dict of a parent where an activation is, or belongs. A function is no registered child, and what takes its
    place is none either: nn.TransformerDecoderLayer, copied, makes any activation that is not among its attributes a
    ReLU."""
    return parent._modules if name in parent._modules else parent.__dict__


def put_identity(parent: nn.Module, name: str, undo: list[Undo]) -> None:
    """nn.Identity in the place of an activation, in its mode."""
    holder = holder_of(parent, name)
    training = getattr(holder[name], "training", parent.training)  # a function has none
    identity = nn.Identity().train(training)
    identity.__dict__[_MOVED] = holder[name]  # no child: nothing is to run it or save it
    put(holder, name, identity, undo)


def put_activation(parent: nn.Module, name: str, otherwise: nn.Module, undo: list[Undo]) -> None:
    """The activation that stood where nn.Identity does now; `otherwise` where that is not known (loaded models)."""
    holder = holder_of(parent, name)
    was = holder[name].__dict__.get(_MOVED, otherwise)
    put(holder, name, was.train(otherwise.training) if isinstance(was, nn.Module) else was, undo)


def fused_activations(model: nn.Module) -> dict[str, str]:
    """{name of a QLinear: name of the nn.Identity where its activation was}, for every name of a shared one."""
    moved = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if name and isinstance(layer, LinearCall) and layer.fused_activation is not None:
            parent_name = name.rpartition(".")[0]
            # A Sequential that was cut after the layer holds no Identity, or something else in its place.
            if type(held(model.get_submodule(parent_name), layer.fused_activation)) is nn.Identity:
                moved[name] = f"{parent_name}.{layer.fused_activation}".lstrip(".")
    return moved
