"""What a module was before quantize_ put another in its place: its class and attributes, for dequantize_."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from pyquant.nn import obstacles
from pyquant.nn.linear_state import LinearState

_MARK: Final = "_pyquant_origin"
_VIEWS: Final = ("_flat_weights", "_flat_weight_refs")  # of nn.LSTM and nn.GRU: the parameters once more


def remember(new: nn.Module, old: nn.Module) -> None:
    """Note what stood where `new` stands, unless to_float gives that: a plain Linear or Conv2d, any Embedding, a
    quantised layer.

    Where `old` itself stands for another module, that one is meant.
    """
    shell = old.__dict__.get(_MARK)
    is_given = type(old) in obstacles.KINDS or isinstance(old, (nn.Embedding, LinearState))
    if shell is None and not is_given:
        shell = _shell(old)
    if shell is not None:
        new.__dict__[_MARK] = shell


def origin_of(module: nn.Module) -> nn.Module | None:
    """A module of the class and with the attributes of the one that stood there, all its tensors None; a new object."""
    shell = module.__dict__.get(_MARK)
    return None if shell is None else _shell(shell)


def has_origin(module: nn.Module) -> bool:
    """Whether the module stands for another."""
    return _MARK in module.__dict__


def _shell(module: nn.Module) -> nn.Module:
    """The module without its tensors: parameters are None, buffers gone, children shells, too."""
    new = type(module).__new__(type(module))
    new.__dict__.update(module.__dict__)
    new.__dict__.update({name: [None] * len(module.__dict__[name]) for name in _VIEWS if name in module.__dict__})
    tensors: dict[str, Any] = {
        "_parameters": dict.fromkeys(module._parameters),
        "_buffers": {},
        "_non_persistent_buffers_set": set(),
        "_modules": {name: None if child is None else _shell(child) for name, child in module._modules.items()},
    }
    new.__dict__.update(tensors)
    new.__dict__.pop(_MARK, None)
    return new
