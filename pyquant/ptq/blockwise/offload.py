"""One block at a time on a device: where it runs, and home again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@contextmanager
def on_device(block: nn.Module, device: torch.device | None) -> Iterator[None]:
    """The block's parameters and buffers are on the device inside; afterwards where the first of them was."""
    if device is None:
        yield
        return
    home = home_of(block)
    try:
        block.to(device)
        yield
    finally:
        block.to(home)


@contextmanager
def each_on_device(blocks: Sequence[nn.Module], device: torch.device | None) -> Iterator[None]:
    """Passes of the whole model inside: every block is on the device while it runs, what goes in and out moves too."""
    if device is None:
        yield
        return
    away: list[tuple[nn.Module, torch.device]] = []

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return_all()  # a pass that ended inside a block left it there
        away.append((block, home_of(block)))
        block.to(device)
        moved: tuple[Any, Any] = to_device((args, kwargs), device)
        return moved

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        home = away[-1][1]
        return_all()
        return to_device(output, home)

    def return_all() -> None:
        while away:
            block, home = away.pop()
            block.to(home)

    with ExitStack() as undo:
        undo.callback(return_all)
        for block in blocks:
            undo.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            undo.callback(block.register_forward_hook(leave, prepend=True).remove)
        yield


def to_device(tree: Any, device: torch.device | None) -> Any:
    """The same with every tensor on the device (None: where it is)."""
    if device is None:
        return tree
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), tree)


def home_of(block: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU where there is none."""
    return next((t.device for t in (*block.parameters(), *block.buffers())), torch.device("cpu"))
