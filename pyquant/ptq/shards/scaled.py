"""Factors of channels between layers, for a model in files: equalisation and smoothing, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, TypeVar

from torch import Tensor, nn

from pyquant.errors import ArgumentError
from pyquant.nn.flow import watch_input
from pyquant.ptq.blockwise.drive import Way, improved
from pyquant.ptq.blockwise.offload import Place
from pyquant.ptq.blockwise.stage import Stage
from pyquant.ptq.improve.equalize import equalize_links_
from pyquant.ptq.improve.equalize_pairs import Link, links_of
from pyquant.ptq.improve.pairs import Pair, factor_of, find_pairs, scale_by
from pyquant.ptq.shards.block_files import OUTSIDE, BlockFiles
from pyquant.ptq.shards.floats import Floats, Run, add_outside, rewritten
from pyquant.ptq.shards.outline import is_float_layer, settled, tensors_in

ALLOWED: Final = "pairs whose producer feeds its consumers and nothing else"
Linked = TypeVar("Linked", bound=Link | Pair)
See = Callable[[Pair, Tensor, int], None]
Result = tuple[BlockFiles, Callable[[list[Pair]], None]]  # where it is kept, what changes some pairs' numbers in place


def equalized(floats: Floats, run: Run) -> Floats:
    """What equalize_ does, without data."""
    blocks = run.blocks()
    links = by_block("equalize", links_of(run.model, None), blocks)

    def write(files: BlockFiles) -> None:
        with settled(run.model, floats.weights, blocks) as residence:
            for done, (name, block) in enumerate(blocks.items(), 1):
                if name not in files:
                    with Place(None, residence).holds(block):
                        equalize_links_(links[name])
                        files.add(name, tensors_in(block, name))
                if run.way.progress is not None:
                    run.way.progress(done, len(blocks), f"equalize {name}")
            equalize_links_(links[OUTSIDE])
            add_outside(files, run.model, blocks)

    return rewritten(floats, run, "equalize", "pairs", ALLOWED, write)


def smoothed(floats: Floats, run: Run, alpha: float = 0.5) -> Floats:
    """What smooth_ does: one pass of the float model, in which every block is left as its inputs were seen."""
    pairs = find_pairs(run.model, None)

    def scale(pairs: list[Pair]) -> None:
        for pair in pairs:
            if pair.amax is not None:
                scale_by(pair, factor_of(pair, alpha))

    def write(files: BlockFiles) -> None:
        walk(floats, run, "smooth", pairs, lambda pair, x, _: pair.observe(x), [(files, scale)])

    return rewritten(floats, run, "smooth", "pairs", ALLOWED, write)


def by_block(improver: str, links: Sequence[Linked], blocks: Mapping[str, nn.Module]) -> dict[str, list[Linked]]:
    """The links or pairs of each block, and of what lies outside of the blocks. Raises ArgumentError for others."""
    home = {f"{name}.{at}".rstrip("."): name for name, block in blocks.items() for at, _ in block.named_modules()}
    found: dict[str, list[Linked]] = {name: [] for name in (*blocks, OUTSIDE)}
    for link in links:
        homes = {home.get(name, OUTSIDE) for name in (link.producer, *link.consumers)}
        if len(homes) > 1:
            got = f"{improver}, for '{link.producer}' and {', '.join(link.consumers)} in {' and '.join(sorted(homes))}"
            raise ArgumentError("improve", got, "pairs of layers within a block; quantize_ takes others")
        found[homes.pop()].append(link)
    return found


def walk(
    floats: Floats,
    run: Run,
    name: str,
    pairs: list[Pair],
    see: See,
    results: list[Result],
) -> None:
    """Every block of the float model once, with the inputs that it is given: what the pairs in it read is watched, then
    the block is kept as each result wants it.

    see      called with a pair, what it reads, and the number of the batch.
    """
    blocks = run.blocks()
    grouped = by_block(name, pairs, blocks)
    watched = {pair.consumers[0]: pair.modules[1][0] for pair in pairs}
    with settled(run.model, floats.weights, blocks) as residence:
        told = run.way.progress
        progress = None if told is None else lambda done, total, what: told(done, total, f"{name} {what}")
        way = Way(run.way.blocks, run.way.device, run.way.cache, None, progress, residence)
        scaling = _Scaling(name, grouped, see, results)
        with ExitStack() as hooks:
            for consumer in watched.values():  # torch's fused paths, which call no layers, are closed to all passes
                hooks.callback(consumer.register_forward_pre_hook(lambda *_: None).remove)
            improved(run.replay, watched, scaling, way, only_floats=True, is_layer=is_float_layer)
        scaling.keep(run.model, OUTSIDE, "", blocks)


class _Scaling:
    """An improver that looks at what pairs of the float model read, and keeps blocks that are changed by it."""

    def __init__(
        self,
        name: str,
        pairs: Mapping[str, list[Pair]],
        see: See,
        results: list[Result],
    ) -> None:
        self.settings, self._pairs, self._see, self._results = name, pairs, see, results

    def look(self, stage: Stage) -> None:
        block = stage.name if stage.is_block else OUTSIDE
        if all(block in files for files, _ in self._results):
            return
        number = 0

        def see(pair: Pair, x: Tensor) -> None:
            self._see(pair, x, number)

        with ExitStack() as hooks:
            watched = [pair for pair in self._pairs[block] if pair.consumers[0] in stage.layers]
            for pair in watched:
                hooks.callback(watch_input(pair.modules[1][0], partial(see, pair)).remove)
            for number in range(len(stage.floats.batches) if watched else 0):
                stage.floats.run(stage.floats.batches[number])

    def improve(self, stage: Stage, _: None) -> dict[str, Any]:
        if stage.is_block:
            self.keep(stage.module, stage.name, stage.name)
        return {}

    def keep(self, module: nn.Module, block: str, at: str, apart: Mapping[str, nn.Module] | None = None) -> None:
        """Keeps a block, or the model but for its blocks, as each result wants it."""
        pairs = self._pairs[block]
        is_used_again = len(self._results) > 1
        tensors = {id(t): t for pair in pairs for t in pair.tensors()} if is_used_again else {}
        before = [partial(t.detach().copy_, t.detach().clone()) for t in tensors.values()]
        for files, change in self._results:
            if block not in files:
                change(pairs)
                files.add(block, tensors_in(module, at, apart))
                for step in before:
                    step()

    def packed(self, result: Any) -> Any:
        return result

    def unpacked(self, value: Any) -> Any:
        return value
