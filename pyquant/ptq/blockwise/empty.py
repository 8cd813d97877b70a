"""Blocks that give out what means nothing: passes that only show how a model calls its blocks, and need no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pyquant.nn.undo import Undo, put


class NotAlikeError(Exception):
    """A block is called in another way than when it was looked at."""


@dataclass(frozen=True)
class Gives:
    """How what a block gives out is shaped.

    inputs     how its arguments were put together.
    leaves     of its output: the place of an argument of the same type and shape, or what is no tensor itself.
    structure  how they are put together.
    """

    inputs: Any
    leaves: tuple[Any, ...]
    structure: Any

    @staticmethod
    def of(given: Sequence[Any], inputs: Any, output: Any, plain: tuple[type, ...]) -> Gives | None:
        """None where a tensor of the output has not the shape of an argument, or something in it is not plain."""
        kinds = {(leaf.dtype, leaf.shape): _At(n) for n, leaf in reversed(list(enumerate(given))) if _is_tensor(leaf)}
        leaves, structure = pytree.tree_flatten(output)
        found = [kinds.get((leaf.dtype, leaf.shape)) if _is_tensor(leaf) else leaf for leaf in leaves]
        if any(isinstance(new, Tensor) or (new is None and old is not None) for new, old in zip(found, leaves)):
            return None
        if not all(isinstance(new, (_At, *plain)) for new in found):
            return None
        return Gives(inputs, tuple(found), structure)

    def zeros(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An output of zeros for these arguments. Raises NotAlikeError."""
        given, inputs = pytree.tree_flatten((args, kwargs))
        if inputs != self.inputs:
            raise NotAlikeError
        leaves = [torch.zeros_like(given[leaf.place]) if isinstance(leaf, _At) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass(frozen=True)
class _At:
    place: int


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


@contextmanager
def giving_zeros(blocks: Sequence[nn.Module], gives: Sequence[Gives]) -> Iterator[None]:
    """Blocks do not run inside, and give out zeros."""
    undo: list[Undo] = []
    try:
        for block, how in zip(blocks, gives, strict=True):
            put(block.__dict__, "forward", partial(_zeros, how), undo)
        yield
    finally:
        for step in reversed(undo):
            step()


def _zeros(how: Gives, *args: Any, **kwargs: Any) -> Any:
    return how.zeros(args, kwargs)


@contextmanager
def giving_halves(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Blocks run inside, and give out half of what they would."""

    def half(leaf: Any) -> Any:
        return leaf / 2 if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_hook(lambda _, __, output: pytree.tree_map(half, output)).remove)
        yield
