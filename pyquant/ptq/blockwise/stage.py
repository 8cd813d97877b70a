"""A piece of a model that an improver works on: a block with its inputs, or the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from pyquant.ptq.improve.matrix import Layer
from pyquant.ptq.improve.replay import Replay
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.float_model import floating_point


@dataclass(frozen=True)
class LayerState:
    """What an improver may replace in a layer, as it was."""

    layer: Layer
    weight: Any
    bias: Any
    fake: FakeQuantize
    originals: Any = None

    @staticmethod
    def of(layer: Layer) -> LayerState:
        """The layer's state now."""
        return LayerState(layer, layer.weight, layer.bias, layer.weight_fake_quant, layer.originals)

    def put_back(self) -> None:
        """The layer has this state again."""
        self.layer.weight, self.layer.bias, self.layer.weight_fake_quant = self.weight, self.bias, self.fake
        self.layer.originals = self.originals


@dataclass(frozen=True)
class Stage:
    """Layers that are worked on together, and how to run what they are part of.

    module    the block, or the model.
    layers    by name, in the order of their first calls; calls: how often each is called in a pass.
    rounded   runs the module on what reaches it from what is in front of it, rounded and improved.
    floats    runs the module on what reaches it in the float model.
    before    the state of every layer of `module` that this stage may change.
    is_whole  whether `floats` can be run as the float model at any time: False where other stages have changed layers
              of `module`, and only `Improver.look` sees the float model.
    is_block  whether the module is a block, not the model.
    """

    name: str
    module: nn.Module
    layers: Mapping[str, Layer]
    calls: Mapping[str, int]
    rounded: Replay
    floats: Replay
    before: tuple[LayerState, ...]
    is_whole: bool = True
    is_block: bool = False

    @contextmanager
    def as_float(self) -> Iterator[None]:
        """The module computes what the float model does: nothing is rounded, its layers are as they were."""
        now = [LayerState.of(state.layer) for state in self.before]
        try:
            for state in self.before:
                state.put_back()
            with floating_point(self.module):
                yield
        finally:
            for state in now:
                state.put_back()


class Improver(Protocol):
    """What is done to the layers of a stage, in place."""

    @property
    def settings(self) -> str:
        """Everything that the results depend on besides model and data."""

    def look(self, stage: Stage) -> Any:
        """What it needs of the float model, which `stage.module` computes meanwhile."""

    def improve(self, stage: Stage, seen: Any) -> dict[str, Any]:
        """Changes the layers; -> what became of each, by name."""

    def packed(self, result: Any) -> Any:
        """What became of a layer, as JSON can hold it."""

    def unpacked(self, value: Any) -> Any:
        """The inverse of packed."""
