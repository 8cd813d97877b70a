"""How a model calls its blocks: where each tensor of a call comes from, so that the call can be made again without it.

A model whose blocks follow each other is a chain: what goes into a block is what an earlier block gave out, what went
into the first one, or something that does not depend on the blocks (masks, positions).
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pyquant.calibrate.padding import NO_PADDING, Padding, now
from pyquant.calibrate.run import Inputs
from pyquant.ptq.blockwise.empty import Gives

# (kind, chain, block, number): a tensor that goes "first" into the first block, comes "from" a block, or is "const"
Ref = tuple[str, int, int, int]
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, slice, enum.Enum, torch.dtype, torch.device)


class NotAChain(Exception):
    """Why the blocks of a list cannot be called one after the other; chain: the list's number."""

    def __init__(self, chain: int, why: str) -> None:
        super().__init__(why)
        self.chain = chain


@dataclass(frozen=True)
class Call:
    """One call of a block: a Ref for every tensor, other arguments as they are, how they are put together, and the
    padding of the batch."""

    leaves: tuple[Any, ...]
    structure: Any
    padding: Padding = NO_PADDING

    def refs(self) -> list[Ref]:
        """Where its tensors come from."""
        return [leaf.ref for leaf in self.leaves if isinstance(leaf, _At)]

    def inputs(self, tensor: Callable[[Ref], Tensor]) -> Inputs:
        """The call, with tensors from `tensor`."""
        leaves = [tensor(leaf.ref) if isinstance(leaf, _At) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return Inputs(args, kwargs, self.padding)


@dataclass(frozen=True)
class _At:
    ref: Ref


@dataclass
class Recording:
    """The calls of one list of blocks in one pass of the model, how what each gives out is shaped, and the tensors that
    came from outside of it."""

    calls: list[Call] = field(default_factory=list)
    gives: list[Gives | None] = field(default_factory=list)
    first: dict[Ref, Tensor] = field(default_factory=dict)
    const: dict[Ref, Tensor] = field(default_factory=dict)


class Recorder:
    """Hooks that record how the blocks of one list are called in one pass; what is no chain raises NotAChain.

    blocks   of one list, in its order; chain: the number of the list.
    Attributes: recording; entered, the number of the block that is running, or None; done, how many have run.
    """

    def __init__(self, blocks: Sequence[nn.Module], chain: int) -> None:
        self._blocks, self._chain = blocks, chain
        self._known: dict[int, tuple[weakref.ref[Tensor], Ref]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._given: tuple[list[Any], Any] = [], None
        self.recording = Recording()
        self.entered: int | None = None
        self.done = 0

    @contextmanager
    def watching(self) -> Iterator[Recorder]:
        """Records inside the block."""
        with ExitStack() as hooks:
            for i, block in enumerate(self._blocks):
                before = block.register_forward_pre_hook(partial(self._enter, i), with_kwargs=True, prepend=True)
                hooks.callback(before.remove)
                hooks.callback(block.register_forward_hook(partial(self._leave, i)).remove)
            yield self

    def _enter(self, i: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if i != self.done or self.entered is not None:
            raise NotAChain(self._chain, f"block {i} is called when block {self.done} should be")
        self.entered = i
        leaves, structure = pytree.tree_flatten((args, kwargs))
        refs = tuple(self._leaf(i, n, leaf) for n, leaf in enumerate(leaves))
        self.recording.calls.append(Call(refs, structure, now()))
        self._given = leaves, structure
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference())
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def _leaf(self, i: int, n: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, _PLAIN):
                why = f"block {i} is given a {type(leaf).__name__}, which may change from call to call"
                raise NotAChain(self._chain, why)
            return leaf
        known = self._known.get(id(leaf))
        if known is not None and known[0]() is leaf:
            return _At(known[1])
        ref = ("first", self._chain, 0, n) if i == 0 else ("const", self._chain, i, len(self.recording.const))
        (self.recording.first if i == 0 else self.recording.const)[ref] = leaf
        self._known[id(leaf)] = (weakref.ref(leaf), ref)
        return _At(ref)

    def _leave(self, i: int, _: nn.Module, __: Any, output: Any) -> None:
        for tensor, version in self._versions:
            if tensor._version != version:
                raise NotAChain(self._chain, f"block {i} changes what it is given in place")
        self.recording.gives.append(Gives.of(*self._given, output, _PLAIN))
        self._versions, self._given = [], ([], None)
        for ref, tensor in outputs_of(self._chain, i, output).items():
            self._known[id(tensor)] = (weakref.ref(tensor), ref)
        self.entered = None
        self.done += 1


def outputs_of(chain: int, block: int, output: Any) -> dict[Ref, Tensor]:
    """The tensors of what a block gave out."""
    leaves = pytree.tree_leaves(output)
    return {("from", chain, block, n): leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def compare(chain: int, recorded: Recording, again: Recording) -> None:
    """Raise NotAChain where two passes over one batch, the second one with other results of the blocks, differ in more
    than what went into the first block."""
    for i, (call, other) in enumerate(zip(recorded.calls, again.calls, strict=True)):
        if call.leaves != other.leaves:
            raise NotAChain(chain, f"block {i} is called in another way when the results of other blocks change")
    for ref, tensor in recorded.const.items():
        if not torch.equal(tensor, again.const[ref]):
            i = next(i for i, call in enumerate(recorded.calls) if ref in call.refs())
            why = f"block {i} is given something that is computed from what block {i - 1} gave out"
            raise NotAChain(chain, why)


def last_uses(passes: Sequence[Sequence[Call]]) -> dict[Ref, int]:
    """{tensor: the last block that it goes into in any pass}."""
    found: dict[Ref, int] = {}
    for calls in passes:
        for i, call in enumerate(calls):
            found |= {ref: max(i, found.get(ref, i)) for ref in call.refs()}
    return found
