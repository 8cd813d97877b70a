"""One block at a time in its place: on a device, or in memory at all, while it runs; and home again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Residence(Protocol):
    """Where the numbers of blocks lie while these do not run: their tensors are on the meta device then."""

    @property
    def fingerprint(self) -> str:
        """What the model and its numbers are known by."""

    def bring(self, block: nn.Module) -> None:
        """The block has its numbers, on the CPU, with what was found for it so far."""

    def leave(self, block: nn.Module) -> None:
        """The block is empty again."""

    def finished(self, block: str, found: Path) -> None:
        """What an improver has found for the layers of a block lies in this file (blockwise/saved.py)."""


@dataclass(frozen=True)
class Place:
    """Where blocks are while they run.

    device     None: where they are.
    residence  where they are when they do not run; None: in memory.
    """

    device: torch.device | None = None
    residence: Residence | None = None

    @contextmanager
    def holds(self, block: nn.Module) -> Iterator[None]:
        """The block is in its place inside; afterwards where it was."""
        home = None
        try:
            home = self._bring(block)
            self._enter(block)
            yield
        finally:
            self._leave(block, home)

    @contextmanager
    def holds_each(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Passes of the whole model inside: a block is in its place while it runs; what goes in and out moves."""
        if self.device is None and self.residence is None:
            yield
            return
        away: list[tuple[nn.Module, torch.device]] = []

        def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return_all()  # a pass that ended inside a block left it there
            away.append((block, self._bring(block)))  # before it moves: a move that fails half way is taken back
            self._enter(block)
            moved: tuple[Any, Any] = to_device((args, kwargs), self.device)
            return moved

        def leave(_: nn.Module, __: Any, output: Any) -> Any:
            home = away[-1][1]
            return_all()
            return output if self.device is None else to_device(output, home)

        def return_all() -> None:
            while away:
                self._leave(*away.pop())

        with ExitStack() as undo:
            undo.callback(return_all)
            for block in blocks:
                undo.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
                undo.callback(block.register_forward_hook(leave, prepend=True).remove)
            yield

    def _bring(self, block: nn.Module) -> torch.device:
        """The block has its numbers; where they lie."""
        if self.residence is not None:
            self.residence.bring(block)
        return home_of(block)

    def _enter(self, block: nn.Module) -> None:
        if self.device is not None:
            block.to(self.device)

    def _leave(self, block: nn.Module, home: torch.device | None) -> None:
        if self.residence is not None:
            self.residence.leave(block)
        elif self.device is not None and home is not None:
            block.to(home)


def to_device(tree: Any, device: torch.device | None) -> Any:
    """The same with every tensor on the device (None: where it is)."""
    if device is None:
        return tree
    return pytree.tree_map_only(Tensor, lambda t: t.to(device), tree)


def home_of(block: nn.Module) -> torch.device:
    """The device of the first parameter or buffer that holds numbers; the CPU where there is none."""
    tensors = (*block.parameters(), *block.buffers())
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
