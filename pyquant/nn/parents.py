"""What modules around quantised layers must be told: to call the layers, where they would read their weights."""

from __future__ import annotations

import re
from typing import Final

from torch import nn

from pyquant.core.remembered import remembered
from pyquant.nn.class_source import source_of
from pyquant.nn.linear_state import LinearState
from pyquant.nn.undo import Undo, put, take

# torch's encoders: the attribute that opens the fused path, and the value that closes it
_FUSED_PATHS: Final = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
# timm's attention (BEiT, EVA02, SwinV2): the attribute that makes a module call a layer, and the layer whose weight it
# reads otherwise
_CALLS_WHERE_SET: Final = re.compile(
    r"if self\.(\w+):\s*\n\s*\w+ = self\.(\w+)\(\w+\)\n(?:[^\n]*\n)?"
    r"\s*else:\s*\n[^\n]*F\.linear\(\w+, (?:weight=)?self\.\2\.weight"
)
# transformers' mixers: the attribute of their config that makes them call a layer (Jamba, FalconMamba: dt_proj)
_FLAG: Final = "_is_quantized"
_CALLS_WHERE_FLAGGED: Final = re.compile(rf"""if hasattr\(self\.config, ["']{_FLAG}["']\):\s*\n[^\n]*self\.\w+\(""")
_FLAGGED: Final = "pyquant_flagged_config"  # on each module whose config got the flag here: how many they are
# transformers' ties {target: source} of parameters, and the patterns from which tie_weights finds them anew
_TIES: Final = "all_tied_weights_keys"
_PATTERNS: Final = "_tied_weights_keys"
_FORMER_TIES: Final = "pyquant_former_ties"


def tell_parents(model: nn.Module, undo: list[Undo]) -> None:
    """Set the switches of a model's modules by what they hold now; `undo` gets the steps that take it back.

    torch's encoder layers have an inference path that reads the weights of their Linears instead of calling them; one
    that holds a quantised layer, or a layer that simulates one, must take the ordinary path, and may come back.
    Attention of timm has a switch between both; mixers of transformers read a weight unless their config says that the
    model is quantised; its models tie parameters, which codes are not.
    """
    asking: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        for name, value, quantised in _switches(layer):
            _turn(layer, name, value, quantised, undo)
        _untie(layer, undo)
        if "config" in layer.__dict__ and _asks_config(type(layer)):
            asking.setdefault(id(layer.__dict__["config"]), []).append(layer)
    for layers in asking.values():
        _flag_config(layers, undo)


def has_quantised(layer: nn.Module) -> bool:
    """Whether a module holds a layer that runs in integers or simulates one."""
    return any(isinstance(module, LinearState) or hasattr(module, "fake_quantizers") for module in layer.modules())


def _switches(layer: nn.Module) -> list[tuple[str, object, nn.Module]]:
    """Of a module: attribute, the value with which it calls layers, and what must hold a quantised one for that."""
    found: list[tuple[str, object, nn.Module]] = [
        (name, off, layer) for kind, name, off in _FUSED_PATHS if isinstance(layer, kind)
    ]
    for name, child in _calls_where_set(type(layer)):
        called = layer._modules.get(child)
        if called is not None:
            found.append((name, True, called))
    return [switch for switch in found if switch[0] in layer.__dict__]


def _turn(layer: nn.Module, name: str, value: object, quantised: nn.Module, undo: list[Undo]) -> None:
    held, former = layer.__dict__, f"pyquant_former_{name}"
    if has_quantised(quantised):
        put(held, former, held.get(former, held[name]), undo)
        put(held, name, value, undo)
    elif former in held:
        put(held, name, take(held, former, undo), undo)


def _untie(model: nn.Module, undo: list[Undo]) -> None:
    """Take the layers that hold codes out of a model's ties; they come back with the layers' parameters."""
    held = model.__dict__
    former = held.get(_FORMER_TIES, held.get(_TIES))
    if not isinstance(former, dict) or not former:
        return
    coded = _coded(model, former)
    kept = {target: source for target, source in former.items() if target not in coded and source not in coded}
    if kept == held[_TIES]:
        return
    put(held, _TIES, kept, undo)
    if kept != former:
        put(held, _FORMER_TIES, former, undo)
        put(held, _PATTERNS, kept, undo)
    else:
        take(held, _FORMER_TIES, undo)
        take(held, _PATTERNS, undo)


def _coded(model: nn.Module, ties: dict[str, str]) -> set[str]:
    """Of the parameters that are tied those whose module has codes in their place."""
    modules = dict(model.named_modules(remove_duplicate=False))
    ends = {*ties.keys(), *ties.values()}
    return {end for end in ends if isinstance(modules.get(end.rpartition(".")[0]), LinearState)}


def _flag_config(layers: list[nn.Module], undo: list[Undo]) -> None:
    """layers: those of one config."""
    held = layers[0].__dict__["config"].__dict__
    if any(map(has_quantised, layers)):
        if _FLAG not in held:
            put(held, _FLAG, True, undo)
            for layer in layers:
                put(layer.__dict__, _FLAGGED, len(layers), undo)
        return
    marked = [layer for layer in layers if _FLAGGED in layer.__dict__]
    if not marked or len(marked) < marked[0].__dict__[_FLAGGED]:  # a part of the model: others may need it
        return
    if _FLAG in held:
        take(held, _FLAG, undo)
    for layer in marked:
        take(layer.__dict__, _FLAGGED, undo)


@remembered
def _asks_config(kind: type[nn.Module]) -> bool:
    """Whether a class calls a layer of its own only where its config has the flag, as its source shows."""
    return _CALLS_WHERE_FLAGGED.search(source_of(kind)) is not None


@remembered
def _calls_where_set(kind: type[nn.Module]) -> list[tuple[str, str]]:
    """Attributes of a class with which it calls a layer, and the layer, as its source shows."""
    return _CALLS_WHERE_SET.findall(source_of(kind))
