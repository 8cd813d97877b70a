"""Which modules of a model are its blocks: the repeated layers of a transformer, the stages of a convolutional net."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from pyquant.core import arguments
from pyquant.core.names import did_you_mean
from pyquant.errors import ArgumentError

Blocks = str | Sequence[str] | None
IsLayer = Callable[[nn.Module], bool]
AUTO = "auto"
_ALLOWED = "'auto', None, the name of a ModuleList or Sequential of blocks, or a sequence of names of blocks"


def block_lists(model: nn.Module, blocks: Blocks, is_layer: IsLayer) -> list[list[str]]:
    """Names of the blocks of every list of blocks, lists in the order of named_modules; [] without any.

    blocks    'auto': every outermost nn.ModuleList or nn.Sequential of two or more modules of one class, which are no
              layers, where some hold layers; a name: the children of that module; names: these, one list; None: none.
    is_layer  whether a module is one of the layers that the caller works on.
    Raises ArgumentError for names that are none, of blocks that are layers or lie in each other.
    """
    if blocks is None:
        return []
    if not isinstance(blocks, str | list | tuple):
        raise ArgumentError("blocks", arguments.shown(blocks), _ALLOWED)
    modules = dict(model.named_modules())
    if blocks == AUTO:
        found: list[list[str]] = []
        for name, module in modules.items():
            inside = any(name.startswith(f"{block}.") for names in found for block in names)
            if not inside and _are_blocks(module, is_layer):
                found.append([f"{name}.{child}".lstrip(".") for child, _ in module.named_children()])
        return found
    if isinstance(blocks, str):
        holder = modules.get(blocks)
        if holder is None or not blocks:
            raise ArgumentError("blocks", repr(blocks), _ALLOWED + did_you_mean(blocks, modules))
        names = [f"{blocks}.{child}" for child, _ in holder.named_children()]
    else:
        names = [arguments.text("blocks", name) for name in arguments.iterable("blocks", blocks, "names")]
        for name in names:
            if name not in modules or not name:
                raise ArgumentError("blocks", repr(name), _ALLOWED + did_you_mean(name, modules))
    if not names or len(set(names)) < len(names):
        raise ArgumentError("blocks", arguments.shown(blocks), f"{_ALLOWED}; at least one block, each once")
    for name in names:
        if is_layer(modules[name]):
            raise ArgumentError("blocks", f"{name}, which is a layer", "modules that hold the layers")
        if any(other != name and other.startswith(f"{name}.") for other in names):
            raise ArgumentError("blocks", f"{name}, which holds another block", "blocks that lie beside each other")
    return [names]


def _are_blocks(module: nn.Module, is_layer: IsLayer) -> bool:
    if not isinstance(module, nn.ModuleList) and type(module).forward is not nn.Sequential.forward:
        return False
    children = list(module.children())  # a module that stands twice is listed once
    same = len({type(child) for child in children}) == 1 and len(children) == len(module._modules) >= 2
    # the config may leave some of the blocks in floating point
    return same and not any(map(is_layer, children)) and any(is_layer(m) for c in children for m in c.modules())
