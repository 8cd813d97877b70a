"""What stands in a model while transformers loads the rest of it: without a parameter that could be loaded into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

_SIZE: Final = "size_of_codes"


class Held(nn.Module):
    """Stands where a quantised layer will; code that looks at the layer's weight while it initialises finds one.

    old    the module whose place it takes.
    size   bytes that the layer will have, which a device map that transformers makes itself counts; 0: none is told.
    """

    def __init__(self, old: nn.Module, size: int = 0) -> None:
        super().__init__()
        of_attention = old._parameters if isinstance(old, nn.MultiheadAttention) else ()
        for name in ("weight", "bias", *of_attention):
            tensor = getattr(old, name, None)
            empty: torch.Tensor | None = None
            if isinstance(tensor, torch.Tensor):  # bias of an LSTM says whether there is one
                empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            if empty is not None:
                empty._is_hf_initialized = True  # type: ignore[attr-defined]
            self.__dict__[name] = empty  # neither parameter nor buffer: nothing is loaded into it
        for name in ("in_features", "out_features", "embedding_dim"):  # a tensor-parallel plan asks for them
            if hasattr(old, name):
                setattr(self, name, getattr(old, name))
        if size:
            self.register_buffer(_SIZE, torch.empty(size, dtype=torch.uint8, device="meta"), persistent=False)

    def reset_parameters(self) -> None:
        """What initialises models may call it of a child; there is nothing here to initialise."""


def forget_sizes(model: nn.Module) -> None:
    """Once a device map is made: what was there to be counted would get memory otherwise."""
    for module in model.modules():
        if isinstance(module, Held):
            module._buffers.pop(_SIZE, None)
            module._non_persistent_buffers_set.discard(_SIZE)


def keep_hook(held: nn.Module, new: nn.Module) -> None:
    """What accelerate hung on the place of a layer, which moves its inputs to its device, on the layer."""
    hook = held.__dict__.get("_hf_hook")
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)


def home_of(model: nn.Module, devices: Mapping[str, Any]) -> Callable[[str], torch.device]:
    """The device of a module: of the longest entry of the map that names it, else where the model is."""
    whole = next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), torch.device("cpu"))

    def home(name: str) -> torch.device:
        found = [entry for entry in devices if not entry or name == entry or name.startswith(f"{entry}.")]
        return torch.device(devices[max(found, key=len)]) if found else whole

    return home
