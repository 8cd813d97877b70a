"""Runs an improver over a model block by block, each fed by the improved blocks before it; linear in their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyquant.calibrate.run import Inputs
from pyquant.core import arguments
from pyquant.core.modes import outside_inference_mode
from pyquant.core.paths import file_path
from pyquant.errors import ArgumentError
from pyquant.nn.undo import undone_on_error
from pyquant.ptq.blockwise.calls import Call, Ref, outputs_of
from pyquant.ptq.blockwise.find import AUTO, Blocks, IsLayer
from pyquant.ptq.blockwise.generation import without_cache
from pyquant.ptq.blockwise.kept import Kept, check_folder
from pyquant.ptq.blockwise.offload import Place, Residence, to_device
from pyquant.ptq.blockwise.plan import Chain, Plan, plan_of, record_first
from pyquant.ptq.blockwise.saved import Saved
from pyquant.ptq.blockwise.stage import Improver, LayerState, Stage
from pyquant.ptq.improve.matrix import Layer
from pyquant.ptq.improve.replay import Calls, Replay, noting_calls
from pyquant.simulate.float_model import float_parameters, floating_point, keep_originals
from pyquant.simulate.unseen_experts import tell_of_untouched

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Way:
    """How a model is gone through: the arguments `blocks`, `device`, `cache`, `save_to` and `progress` of improvers.

    residence  where blocks are that are not in memory; `save_to` is given with it.
    Raises ArgumentError for values that are none."""

    blocks: Blocks = AUTO
    device: torch.device | str | None = None
    cache: str | os.PathLike[str] | None = None
    save_to: str | os.PathLike[str] | None = None
    progress: Progress | None = None
    residence: Residence | None = None
    place: Place = field(init=False, default=Place())

    def __post_init__(self) -> None:
        arguments.function("progress", self.progress, "(done, total, what)")
        try:
            device = None if self.device is None else torch.device(self.device)
        except (RuntimeError, TypeError, ValueError):
            raise ArgumentError("device", arguments.shown(self.device), "a device, or None") from None
        if self.cache is not None:
            check_folder(file_path("cache", self.cache))
        object.__setattr__(self, "place", Place(device, self.residence))

    def refuse_without_blocks(self, why: str) -> None:
        """Raise ArgumentError where something was asked for that only blocks can give."""
        if self.residence is not None:
            raise ArgumentError("blocks", arguments.shown(self.blocks), f"blocks that files can be read by: {why}")
        for name in ("device", "cache", "save_to"):
            if getattr(self, name) is not None:
                raise ArgumentError(name, arguments.shown(getattr(self, name)), f"None: {why}")


def improved(
    replay: Replay,
    layers: dict[str, Any],
    improver: Improver,
    way: Way,
    *,
    only_floats: bool = False,
    is_layer: IsLayer = lambda module: isinstance(module, Layer),
) -> dict[str, Any]:
    """Run the improver over every layer; -> {layer: what became of it}, in the order of their calls.

    replay   the model and its batches.     layers   those of the model that may change, by name.
    only_floats   the improver looks at the float model alone, and nothing is rounded; `layers` may then be any modules.
    is_layer   what blocks are made of, where they have to be found.
    On an exception everything is as before; with save_to, finished blocks are as they were found and saved.
    Raises ArgumentError for blocks that cannot be called one after the other where they were named, and for arguments
    that need blocks where there are none.
    """
    model = replay.module
    floats = floating_point(model) if only_floats else nullcontext()
    # Parameters that are made in inference mode cannot be trained, nor can anything be learned in it.
    with outside_inference_mode(), without_cache(model), Kept(way.cache) as kept, floats:
        plan = plan_of(replay, layers, way.blocks, kept, way.place, is_layer)
        if not plan.chains:
            way.refuse_without_blocks(plan.why_whole)
        saved = None if way.save_to is None else Saved(way.save_to, model, kept, plan, improver.settings, way.residence)
        drive = _Drive(replay, layers, improver, way, plan, kept, saved, only_floats)
        with ExitStack() as last:
            if saved is not None:
                last.enter_context(saved)
            with undone_on_error() as undo, closing(drive.run()) as stages:
                for done, stage in enumerate(stages, 1):
                    if saved is None:
                        undo.extend(state.put_back for state in stage.before)
                    if way.progress is not None:
                        way.progress(done, drive.total, stage.name)
                if not only_floats:  # a warning that the caller made an error is one, too
                    tell_of_untouched(model, layers, drive.results)
        return drive.results


class _Drive:
    def __init__(
        self,
        replay: Replay,
        layers: dict[str, Any],
        improver: Improver,
        way: Way,
        plan: Plan,
        kept: Kept,
        saved: Saved | None,
        only_floats: bool,
    ) -> None:
        self.replay, self.layers, self.improver, self.way = replay, layers, improver, way
        self.plan, self.kept, self.saved, self.only_floats = plan, kept, saved, only_floats
        self.blocks = [block for chain in plan.chains for block in chain.blocks]
        self.results: dict[str, Any] = {}
        self.total = sum(len(step.blocks) if isinstance(step, Chain) else 1 for step in plan.steps)

    def run(self) -> Generator[Stage, None, None]:
        """Everything; yields every finished stage."""
        groups = [step for step in self.plan.steps if not isinstance(step, Chain)]
        seen: list[Any] = []
        stages = [self._whole(f"layers {i}", calls) for i, calls in enumerate(groups)]
        for stage in stages:  # of the float model, while there is one
            with floating_point(self.replay.module), self._passes():
                skips = self.saved is not None and stage.name in self.saved
                seen.append(None if skips else self.improver.look(stage))
        for step in self.plan.steps:
            if isinstance(step, Chain):
                yield from self._chain(step)
            else:
                stage, looked = stages.pop(0), seen.pop(0)
                with self._passes():
                    yield self._improve(stage, partial(_first, looked))

    def _passes(self) -> Any:
        return self.way.place.holds_each(self.blocks)

    def _whole(self, name: str, calls: Mapping[str, int]) -> Stage:
        layers = {layer: self.layers[layer] for layer in calls}
        before = self._states(layers)
        is_whole = len(self.plan.steps) == 1
        return Stage(name, self.replay.module, layers, calls, self.replay, self.replay, before, is_whole)

    def _states(self, layers: Mapping[str, Any]) -> tuple[LayerState, ...]:
        """What may be replaced in these layers."""
        return () if self.only_floats else tuple(LayerState.of(layer) for layer in layers.values())

    def _improve(self, stage: Stage, look: Callable[[Stage], Any]) -> Stage:
        # with save_to nothing is kept of finished blocks, but where a residence lets go of them
        lets_go = self.saved is not None and self.way.residence is None
        floats = {} if lets_go else {id(s.layer): float_parameters(s.layer) for s in stage.before}
        with undone_on_error([state.put_back for state in stage.before]):
            if self.saved is not None and stage.name in self.saved:
                values = self.saved.restore(stage)
                self.results |= {name: self.improver.unpacked(value) for name, value in values.items()}
            else:
                found = self.improver.improve(stage, look(stage))
                self.results |= found
                if self.saved is not None:
                    values = {name: self.improver.packed(result) for name, result in found.items()}
                    self.saved.add(stage, values)
            for state in stage.before:
                if state.layer.weight is not state.weight or state.layer.bias is not state.bias:
                    keep_originals(state.layer, floats.get(id(state.layer)))
        return stage

    def _chain(self, chain: Chain) -> Iterator[Stage]:
        others = [block for block in self.blocks if block is not chain.blocks[0]]  # which is not run
        with self.way.place.holds_each(others):
            record_first(self.replay, chain, self.kept)
        for i, block in enumerate(chain.blocks):
            floats, rounded = (Replay.over(block, _Inputs(self, chain, i, which)) for which in ("float", "rounded"))
            with self.way.place.holds(block):
                with floating_point(block):
                    calls = self._give_out(chain, i, floats, "float")
                layers = {name: self.layers[name] for name in calls}
                stage = Stage(
                    chain.names[i], block, layers, calls, rounded, floats, self._states(layers), is_block=True
                )
                yield self._improve(stage, self._looked)
                if not self.only_floats:
                    self._give_out(chain, i, rounded, "rounded")
            for ref, last in chain.last_uses.items():
                if last <= i:
                    self._forget(ref)

    def _looked(self, stage: Stage) -> Any:
        with floating_point(stage.module):
            return self.improver.look(stage)

    def _give_out(self, chain: Chain, i: int, replay: Replay, which: str) -> Mapping[str, int]:
        """Keep what the block gives to those that follow; -> its layers, by how often they are called."""
        counts = which == "float" and not chain.is_counted
        calls = Calls()
        if not counts and not any(ref[0] == "from" and ref[2] == i for ref in chain.last_uses):
            return chain.layers[i]
        for b, batch in enumerate(replay.batches):
            with noting_calls(self._held(chain, i) if counts else {}) as called:
                output = replay.run(batch)
            calls.add(called)
            for ref, tensor in outputs_of(chain.at, i, output).items():
                if chain.last_uses.get(ref, -1) > i:
                    self.kept.put((which, b, ref), tensor.to(chain.home))
        return {name: calls.most[name] for name in calls.order} if counts else chain.layers[i]

    def _held(self, chain: Chain, i: int) -> dict[str, Any]:
        held = {id(module) for module in chain.blocks[i].modules()}
        return {name: layer for name, layer in self.layers.items() if id(layer) in held}

    def _forget(self, ref: Ref) -> None:
        for b in range(len(self.replay.batches)):
            for which in ("float", "rounded", "both"):
                self.kept.drop((which, b, ref))


def _first(known: Any, _: Stage) -> Any:
    return known


class _Inputs(Sequence[Inputs]):
    """What goes into one block, batch by batch; made when it is asked for, on the block's device."""

    def __init__(self, drive: _Drive, chain: Chain, block: int, which: str) -> None:
        self._drive, self._which = drive, which
        self._calls: list[Call] = [calls[block] for calls in chain.batches]

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, i: Any) -> Any:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return to_device(self._calls[i].inputs(lambda ref: self._tensor(i, ref)), self._drive.way.place.device)

    def _tensor(self, batch: int, ref: Ref) -> Tensor:
        kept = self._drive.kept
        key = (self._which, batch, ref)
        return kept.get(key if key in kept else ("both", batch, ref))
