"""Searched factors of channels for a model in files: three models are written, and the best of them stays."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from pyquant.io.journal import Journal
from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.nn.sites import find_owners
from pyquant.ptq.blockwise.drive import Way
from pyquant.ptq.blockwise.generation import without_cache
from pyquant.ptq.blockwise.offload import Place
from pyquant.ptq.blockwise.ranges import calibrate_by
from pyquant.ptq.improve.errors import error_function, held_out_of
from pyquant.ptq.improve.matrix import Layer
from pyquant.ptq.improve.pairs import Pair, find_pairs, scale_by
from pyquant.ptq.improve.replay import Replay, check_unmoved
from pyquant.ptq.improve.scale_search import HALF, NONE, SEARCHED, Factors, Reads, schemes_by, simulating
from pyquant.ptq.shards.block_files import BlockFiles
from pyquant.ptq.shards.floats import KIND, Floats, Run
from pyquant.ptq.shards.outline import blocks_of, settled
from pyquant.ptq.shards.scaled import ALLOWED, walk
from pyquant.simulate.calibrate import targets_of

NAME: Final = "search_scales"


def searched(floats: Floats, run: Run) -> Floats:
    """What search_scales_ does: a pass of the float model, in which each block is kept with both factors, then passes
    of the models without any, with smooth_'s and with its own, rounded."""
    folder, facts = run.folder / NAME, run.facts(floats, f"{NAME} {run.config!r}")
    with Journal(folder / "errors.journal", "errors of scales", facts) as journal:
        if len(journal.entries) < 3:
            _compare(floats, run, folder, facts, journal)
        errors = {way: journal.entries[way]["error"] for way in (NONE, HALF, SEARCHED)}
    chosen = min(errors, key=lambda way: errors[way])  # the first of equals: the simplest
    for way in {HALF, SEARCHED} - {chosen}:
        shutil.rmtree(folder / way, ignore_errors=True)
    return floats if chosen == NONE else _written(run, folder / chosen, facts)


def _compare(floats: Floats, run: Run, folder: Path, facts: Mapping[str, str], journal: Journal) -> None:
    """Both models are written, and the errors of all three."""
    count = len(run.replay.batches)
    split = count - held_out_of(None, count)
    with BlockFiles(folder / HALF, KIND, facts) as half, BlockFiles(folder / SEARCHED, KIND, facts) as best:
        _write(floats, run, half, best, split)
    targets = run.outputs(floats.weights, list(range(split, count)))
    for way in (NONE, HALF, SEARCHED):
        if way not in journal.entries:
            written = floats if way == NONE else _written(run, folder / way, facts)
            check_unmoved("pairs", targets[0], run.output(written.weights, split), ALLOWED)
            journal.add(way, {"error": _rounded_error(written, run, targets, split, way)})


def _write(floats: Floats, run: Run, half: BlockFiles, best: BlockFiles, split: int) -> None:
    pairs = find_pairs(run.model, None)
    schemes = schemes_by(run.model, run.config)
    reads = {pair.producer: Reads(pair) for pair in pairs}
    found: dict[str, Factors] = {}

    def see(pair: Pair, x: Tensor, batch: int) -> None:
        reads[pair.producer].see(x, batch >= split)

    def scale(pairs: list[Pair], which: str) -> None:
        for pair in pairs:  # all are found before the first is used, and their rows let go
            read = reads.pop(pair.producer, None)
            if read is not None and read.are_enough:
                found[pair.producer] = read.factors(schemes)
        for pair in pairs:
            factors = found.get(pair.producer)
            factor = None if factors is None else factors.half if which == HALF else factors.best
            if factor is not None:
                scale_by(pair, factor)

    walk(floats, run, NAME, pairs, see, [(half, lambda ps: scale(ps, HALF)), (best, lambda ps: scale(ps, SEARCHED))])


def _written(run: Run, folder: Path, facts: Mapping[str, str]) -> Floats:
    with BlockFiles(folder, KIND, facts) as files:
        return Floats(run.model, FloatWeights(run.model, files, mapping=()), files.digest)


def _rounded_error(floats: Floats, run: Run, targets: list[Any], split: int, name: str) -> float:
    """The mean error of a model's held-out outputs, quantised in simulation."""
    model, batches, measure = run.model, run.replay.batches, error_function(None)
    owners = find_owners(model)
    with simulating(model, run.config):
        blocks = blocks_of(model, run.way, lambda module: isinstance(module, Layer))
        with settled(model, floats.weights, blocks, owners, floats.facts) as residence, without_cache(model):
            fakes = {target.name: target.fake for target in targets_of(model, weights=False)}
            folder = run.folder / NAME / f"ranges {name}"
            told = run.way.progress
            progress = None if told is None else lambda done, total, what: told(done, total, f"{NAME} {what}")
            way = Way(run.way.blocks, run.way.device, run.way.cache, folder, progress, residence)
            calibrate_by(Replay(model, batches, split, run.replay.batch_to_inputs), fakes, way)
            with Place(run.way.place.device, residence).holds_each(list(blocks.values())):
                losses = [run.replay.error(measure, target, batches[split + i]) for i, target in enumerate(targets)]
    return sum(losses) / len(losses)
