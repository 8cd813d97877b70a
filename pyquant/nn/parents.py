"""What modules around quantised layers must be told: to call the layers, where they would read their weights."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Final

from torch import nn

from pyquant.nn.linear_state import LinearState
from pyquant.nn.undo import Undo, put, take

# torch's encoders: the attribute that opens the fused path, and the value that closes it
_FUSED_PATHS: Final = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
# transformers' mixers: the attribute of their config that makes them call a layer (Jamba, FalconMamba: dt_proj)
_FLAG: Final = "_is_quantized"
_CALLS_WHERE_FLAGGED: Final = re.compile(rf"""if hasattr\(self\.config, ["']{_FLAG}["']\):\s*\n[^\n]*self\.\w+\(""")
_FLAGGED: Final = "pyquant_flagged_config"  # on each module whose config got the flag here: how many they are


def tell_parents(model: nn.Module, undo: list[Undo]) -> None:
    """Set the switches of a model's modules by what they hold now; `undo` gets the steps that take it back.

    torch's encoder layers have an inference path that reads the weights of their Linears instead of calling them; one
    that holds a quantised layer, or a layer that simulates one, must take the ordinary path, and may come back. Mixers
    of transformers read a weight unless their config says that the model is quantised.
    """
    asking: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        _leave_fused_path(layer, undo)
        if "config" in layer.__dict__ and _asks_config(type(layer)):  # type: ignore[arg-type]  # a class has a hash
            asking.setdefault(id(layer.__dict__["config"]), []).append(layer)
    for layers in asking.values():
        _flag_config(layers, undo)


def has_quantised(layer: nn.Module) -> bool:
    """Whether a module holds a layer that runs in integers or simulates one."""
    return any(isinstance(module, LinearState) or hasattr(module, "fake_quantizers") for module in layer.modules())


def _leave_fused_path(layer: nn.Module, undo: list[Undo]) -> None:
    for kind, name, off in _FUSED_PATHS:
        if isinstance(layer, kind) and name in layer.__dict__:
            former = f"pyquant_former_{name}"
            if has_quantised(layer):
                put(layer.__dict__, former, layer.__dict__.get(former, layer.__dict__[name]), undo)
                put(layer.__dict__, name, off, undo)
            elif former in layer.__dict__:
                put(layer.__dict__, name, take(layer.__dict__, former, undo), undo)


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


@cache
def _asks_config(kind: type[nn.Module]) -> bool:
    """Whether a class calls a layer of its own only where its config has the flag, as its source shows."""
    try:
        source = "".join(inspect.getsource(base) for base in kind.__mro__ if base not in (nn.Module, object))
    except (OSError, TypeError):  # compiled, or typed into a terminal
        return False
    return _CALLS_WHERE_FLAGGED.search(source) is not None
