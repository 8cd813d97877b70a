"""A float model in files on its way through improvers of the float model: what each is given, and what it leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.io.shards import digest
from pyquant.nn.sites import Config
from pyquant.nn.undo import Undo
from pyquant.ptq.blockwise.drive import Way
from pyquant.ptq.blockwise.generation import without_cache
from pyquant.ptq.blockwise.offload import Place
from pyquant.ptq.improve.replay import Replay, check_unmoved
from pyquant.ptq.shards.block_files import OUTSIDE, BlockFiles
from pyquant.ptq.shards.outline import blocks_of, is_float_layer, settled, tensors_in

KIND: Final = "float blocks"
_CHECKED: Final = "checked"  # a file beside the blocks: the model with them gives what it gave before


@dataclass(frozen=True)
class Floats:
    """A float model whose numbers are in files, and what these are known by; the model is on the meta device."""

    model: nn.Module
    weights: FloatWeights
    facts: str


@dataclass(frozen=True)
class Run:
    """What improvers of the float model are given.

    replay  the model and its batches; config: what it is to be quantised by; undo: receives the steps that take a
            change of the model back; way: `save_to` is the folder of everything.
    """

    replay: Replay
    config: Config
    way: Way
    undo: list[Undo]

    @property
    def model(self) -> nn.Module:
        return self.replay.module

    @property
    def folder(self) -> Path:
        return Path(self.way.save_to or "")

    def blocks(self) -> dict[str, nn.Module]:
        """The blocks of the float model by name."""
        return blocks_of(self.model, self.way, is_float_layer)

    def facts(self, floats: Floats, step: str) -> dict[str, str]:
        """What a step's results depend on."""
        return {
            "floats": floats.facts,
            "model": hashlib.sha256(str(self.model).encode()).hexdigest(),
            "step": step,
            "blocks": " ".join(self.blocks()),
            "data": _digest_of(self.replay),
        }

    def output(self, weights: FloatWeights, batch: int) -> Any:
        """What the float model gives out for a batch."""
        return self.outputs(weights, [batch])[0]

    def outputs(self, weights: FloatWeights, batches: list[int]) -> list[Any]:
        """What the float model gives out for these batches, each in a pass that reads the blocks."""
        blocks = self.blocks()
        with settled(self.model, weights, blocks) as residence, without_cache(self.model):
            place = Place(self.way.place.device, residence)
            with place.holds_each(list(blocks.values())):
                return [self.replay.run(self.replay.batches[i]) for i in batches]


def rewritten(
    floats: Floats,
    run: Run,
    name: str,
    argument: str,
    allowed: str,
    write: Callable[[BlockFiles], None],
    change: Callable[[], None] = lambda: None,
) -> Floats:
    """The model with other numbers and the same function: all of them are in a folder of their own.

    name     of the improver and of its folder.
    argument, allowed   of the error where the function is another one.
    write    adds every block, and what lies outside of them, where it is not there yet.
    change   of the model itself, without its numbers, before anything is written.
    """
    folder = run.folder / name
    with BlockFiles(folder, KIND, run.facts(floats, name)) as files:
        is_checked = (folder / _CHECKED).exists()
        before = None if is_checked else run.output(floats.weights, 0)
        change()
        if not is_checked:
            write(files)
    after = Floats(run.model, FloatWeights(run.model, files, mapping=()), files.digest)
    if not is_checked:
        check_unmoved(argument, before, run.output(after.weights, 0), allowed)
        (folder / _CHECKED).touch()
    return after


def add_outside(files: BlockFiles, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Keeps what lies outside of the blocks, as it is in the model now."""
    if OUTSIDE not in files:
        files.add(OUTSIDE, tensors_in(model, "", blocks))


def _digest_of(replay: Replay) -> str:
    """What the inputs of the model are known by."""
    hasher = hashlib.sha256()
    for batch in replay.batches:
        args, kwargs, padding = replay.inputs(batch)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        hasher.update(f"{structure}\n{padding.text()}".encode())
        for leaf in leaves:
            known = digest(leaf.detach().cpu().contiguous()) if isinstance(leaf, Tensor) else repr(leaf)
            hasher.update(f"{known}\n".encode())
    return hasher.hexdigest()
