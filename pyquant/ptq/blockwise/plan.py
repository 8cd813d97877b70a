"""The order of work on a model: chains of blocks and the layers around them, found in one pass of the float model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pyquant.errors import ArgumentError
from pyquant.ptq.blockwise.calls import Call, NotAChain, Recorder, Recording, Ref, compare, last_uses
from pyquant.ptq.blockwise.empty import NotAlikeError, giving_halves, giving_zeros
from pyquant.ptq.blockwise.find import AUTO, Blocks, IsLayer, block_lists
from pyquant.ptq.blockwise.kept import Kept
from pyquant.ptq.blockwise.offload import Place, home_of
from pyquant.ptq.improve.replay import Calls, Enough, Replay
from pyquant.simulate.float_model import floating_point

Zeros = Callable[[], AbstractContextManager[None]]  # inside, no block runs


@dataclass(frozen=True)
class Chain:
    """A list of blocks that can be called one after the other.

    at         its number.
    layers     of each block: {name: calls in a pass, at most}, in the order of the calls.
    is_counted   whether these are of all batches, not of the first one.
    batches    how each batch's pass calls each block.     last_uses   {tensor of those: the last block it goes into}.
    home       where the blocks' inputs are kept.
    """

    at: int
    names: Sequence[str]
    blocks: Sequence[nn.Module]
    layers: Sequence[Mapping[str, int]]
    batches: Sequence[Sequence[Call]]
    last_uses: Mapping[Ref, int]
    home: torch.device
    is_counted: bool = True


@dataclass(frozen=True)
class Plan:
    """Chains and layers outside of them ({name: calls in a pass}), in the order of their first calls.

    why_whole   why there is no chain."""

    steps: Sequence[Chain | Mapping[str, int]]
    why_whole: str = ""

    @property
    def chains(self) -> list[Chain]:
        """Those of its steps that are blocks."""
        return [step for step in self.steps if isinstance(step, Chain)]


class _List:
    """A list of blocks that may prove to be a chain; at: its number."""

    def __init__(self, at: int, names: Sequence[str], model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self.at, self.names, self.blocks = at, names, [model.get_submodule(name) for name in names]
        self.owners: dict[str, int] = {}  # {layer: its block}
        for i, block in enumerate(self.blocks):
            held = {id(module) for module in block.modules()}
            for name in (name for name, layer in layers.items() if id(layer) in held):
                if self.owners.setdefault(name, i) != i:
                    raise NotAChain(at, f"{name} stands in blocks {self.owners[name]} and {i}")
        self.batches: list[list[Call]] = []

    def chain(self, calls: Mapping[str, int], home: torch.device, is_counted: bool) -> Chain:
        """It is one. calls: of all layers, in their order."""
        held: list[dict[str, int]] = [{} for _ in self.blocks]
        for name in calls:
            if name in self.owners:
                held[self.owners[name]][name] = calls[name]
        return Chain(self.at, self.names, self.blocks, held, self.batches, last_uses(self.batches), home, is_counted)


def plan_of(
    replay: Replay, layers: Mapping[str, nn.Module], blocks: Blocks, kept: Kept, place: Place, is_layer: IsLayer
) -> Plan:
    """The plan of a model; what the float model gives to the first block of each chain is in `kept` afterwards.

    is_layer  what blocks are made of.
    Lists of blocks that are no chains are refused where they were named, or are not in memory, and left out where they
    were found ('auto'). Of a model that is not in memory one pass runs the blocks; in others these give zeros, where
    what they give has the shape of something that they are given.
    """
    names = block_lists(replay.module, blocks, is_layer)
    why = "blocks=None" if blocks is None else "no list of blocks is found in this model; blocks=... names them"
    while names:
        try:
            return _planned(replay, layers, names, kept, place)
        except NotAChain as error:
            first, *_, last = names[error.chain] * 2
            why = f"the blocks {first} to {last} are no chain: {error}"
            if blocks != AUTO or place.residence is not None:
                raise ArgumentError("blocks", why, "blocks of which each is given what those before it give") from None
            del names[error.chain]
            kept.clear()
    if place.residence is not None:
        return Plan([], why)
    with floating_point(replay.module):
        calls = replay.calls(layers)
    return Plan([calls] if calls else [], why)


def record_first(replay: Replay, chain: Chain, kept: Kept) -> None:
    """Keep what the model as it is now gives to the first block of a chain, for every batch."""
    for b, batch in enumerate(replay.batches):
        recorder = Recorder(chain.blocks[:1], chain.at)
        with recorder.watching(), _ends(chain.blocks[0], before=True), suppress(Enough):
            replay.run(batch)
        for ref, tensor in recorder.recording.first.items():
            if ref not in chain.last_uses:
                continue
            floats = kept.get(("float", b, ref))
            if floats.dtype == tensor.dtype and torch.equal(floats.to(tensor.device), tensor):
                kept.put(("both", b, ref), floats)
                kept.drop(("float", b, ref))
            else:
                kept.put(("rounded", b, ref), tensor)


def _planned(
    replay: Replay, layers: Mapping[str, nn.Module], names: Sequence[Sequence[str]], kept: Kept, place: Place
) -> Plan:
    lists = [_List(at, given, replay.module, layers) for at, given in enumerate(names)]
    blocks = [block for list_ in lists for block in list_.blocks]
    home = home_of(replay.module)
    events: list[str | int] = []  # layers as they are called, and numbers of lists as their first blocks are
    calls = Calls()
    with floating_point(replay.module), place.holds_each(blocks):
        seen = _record(replay, lists, 0, layers, events)
    calls.add(events)
    order = [at for at in calls.order if isinstance(at, int)]
    for list_, recording in zip(lists, seen, strict=True):
        if len(recording.calls) < len(list_.blocks):
            raise NotAChain(list_.at, f"block {len(recording.calls)} is never called")
    gives = [how for recording in seen for how in recording.gives if how is not None]
    # what a second list is given comes from the first one
    may_be_empty = place.residence is not None and len(lists) == 1 and len(gives) == len(blocks)
    zeros = partial(giving_zeros, blocks, gives) if may_be_empty else None
    again = _with_other_results(replay, lists, blocks, place, zeros)
    for list_, recording, other in zip(lists, seen, again, strict=True):
        compare(list_.at, recording, other)
    del again
    with floating_point(replay.module):
        for b in range(len(replay.batches)):
            if b > 0:
                events.clear()
                seen = _later(replay, lists, b, layers, events, lists[order[-1]].blocks[-1], place, zeros)
                calls.add(events)
            for list_, recording in zip(lists, seen, strict=True):
                if len(recording.calls) < len(list_.blocks):
                    raise NotAChain(list_.at, f"block {len(recording.calls)} is not called for batch {b}")
                list_.batches.append(recording.calls)
                for ref, tensor in recording.first.items():
                    kept.put(("float", b, ref), tensor)
                for ref, tensor in recording.const.items():
                    kept.put(("both", b, ref), tensor)
            seen = []
    return _in_order(lists, calls, home, is_counted=zeros is None)


def _with_other_results(
    replay: Replay, lists: Sequence[_List], blocks: Sequence[nn.Module], place: Place, zeros: Zeros | None
) -> list[Recording]:
    """The first batch again, where blocks give out something else than in the float model."""
    if zeros is not None:
        with zeros():
            return _record(replay, lists, 0)
    is_known = place.residence is None  # otherwise what they round to may be found later
    with place.holds_each(blocks), nullcontext() if is_known else _floats_halved(replay.module, blocks):
        return _record(replay, lists, 0)


@contextmanager
def _floats_halved(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    with floating_point(model), giving_halves(blocks):
        yield


def _later(
    replay: Replay,
    lists: Sequence[_List],
    batch: int,
    layers: Mapping[str, nn.Module],
    events: list[str | int],
    last: nn.Module,
    place: Place,
    zeros: Zeros | None,
) -> list[Recording]:
    """The pass of another batch than the first, which ends behind the last block."""
    blocks = [block for list_ in lists for block in list_.blocks]
    if zeros is not None:
        with suppress(NotAlikeError), _ends(last, before=False), zeros():
            return _record(replay, lists, batch, layers, events)
        events.clear()
    with place.holds_each(blocks), _ends(last, before=False):
        return _record(replay, lists, batch, layers, events)


def _in_order(lists: Sequence[_List], calls: Calls, home: torch.device, is_counted: bool) -> Plan:
    inside = {name for list_ in lists for name in list_.owners}
    counts = {name: calls.most[name] for name in calls.order if isinstance(name, str)}
    steps: list[Chain | dict[str, int]] = []
    for event in calls.order:
        if isinstance(event, int):
            steps.append(lists[event].chain(counts, home, is_counted))
        elif event not in inside:
            if not steps or isinstance(steps[-1], Chain):
                steps.append({})
            steps[-1][event] = counts[event]  # type: ignore[index]
    return Plan(steps)


def _record(
    replay: Replay,
    lists: Sequence[_List],
    batch: int,
    layers: Mapping[str, nn.Module] | None = None,
    events: list[str | int] | None = None,
) -> list[Recording]:
    """One pass of the model. layers, events: calls of these, and of lists, are written down in the order in which they
    begin."""
    recorders = [Recorder(list_.blocks, list_.at) for list_ in lists]

    def called(name: str, *_: object) -> None:
        for list_, recorder in zip(lists, recorders, strict=True):
            if name in list_.owners and recorder.entered != list_.owners[name]:
                raise NotAChain(list_.at, f"{name} is called from outside of its block")
        if events is not None:
            events.append(name)

    with ExitStack() as hooks, suppress(Enough):
        for recorder in recorders:
            hooks.enter_context(recorder.watching())
        for name, layer in (layers or {}).items():
            hooks.callback(layer.register_forward_pre_hook(partial(called, name)).remove)
        if events is not None:
            for list_ in lists:
                first = list_.blocks[0].register_forward_pre_hook(lambda *_, at=list_.at: events.append(at))
                hooks.callback(first.remove)
        replay.run(replay.batches[batch])
    return [recorder.recording for recorder in recorders]


@contextmanager
def _ends(block: nn.Module, *, before: bool) -> Iterator[None]:
    """A pass ends before or after a block, by Enough."""

    def stop(*_: object) -> None:
        raise Enough

    handle = block.register_forward_pre_hook(stop) if before else block.register_forward_hook(stop)
    try:
        yield
    finally:
        handle.remove()
