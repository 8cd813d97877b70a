"""Ranges of static inputs and outputs block by block, for models whose blocks are not in memory together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.calibrate import Range
from pyquant.calibrate.padding import left_out
from pyquant.ptq.blockwise.drive import Way, improved
from pyquant.ptq.blockwise.stage import Stage
from pyquant.ptq.improve.matrix import simulated_layers
from pyquant.ptq.improve.replay import Replay
from pyquant.simulate.calibrate import ranges_of, set_ranges
from pyquant.simulate.fake_quantize import FakeQuantize

Found = tuple[Range | None, int]  # of a tensor: its range, and how many numbers were seen


def calibrate_by(replay: Replay, fakes: Mapping[str, FakeQuantize], way: Way) -> None:
    """Set the ranges that calibrate_ would: statistics do not depend on the order of batches.

    fakes  of the model, by the names of their layers and tensors.
    """
    if fakes:
        found = improved(replay, simulated_layers(replay.module), _Calibration(fakes), way, only_floats=True)
        set_ranges(fakes, replay.module, {name: found.get(name, (None, 0)) for name in fakes})


class _Calibration:
    """An improver that looks at the float model, and changes nothing."""

    def __init__(self, fakes: Mapping[str, FakeQuantize]) -> None:
        self._fakes = fakes
        schemes = " ".join(f"{name} {fake.scheme!r}" for name, fake in fakes.items())
        self.settings: Final = f"ranges of {schemes}"

    def look(self, stage: Stage) -> dict[str, Found]:
        within = {id(module) for module in stage.module.modules()}
        if not stage.is_block:
            within = {id(fake) for layer in stage.layers.values() for fake in layer.modules()}
        fakes = {name: fake for name, fake in self._fakes.items() if id(fake) in within}
        if not fakes:
            return {}
        replay = stage.floats
        called = _Called(replay)
        given = [(batch,) for batch in range(len(replay.batches))]
        return ranges_of(fakes, called, given, len(given), batch_to_inputs=lambda batch: batch)

    def improve(self, stage: Stage, seen: dict[str, Found]) -> dict[str, Found]:
        return seen

    def packed(self, result: Found) -> Any:
        range_, count = result
        return [count, *([] if range_ is None else [_plain(range_.low), _plain(range_.high)])]

    def unpacked(self, value: Any) -> Found:
        count, *ends = value
        return (Range(*(torch.tensor(end, dtype=torch.float32, device="cpu") for end in ends)) if ends else None), count


class _Called(nn.Module):
    """A module that is called with the arguments of a batch, by its number."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self.module, self._replay = replay.module, replay

    def forward(self, batch: int) -> Any:
        args, kwargs, padding = self._replay.inputs(self._replay.batches[batch])
        with left_out(padding):
            return self.module(*args, **kwargs)


def _plain(end: Tensor) -> Any:
    return end.cpu().tolist()
