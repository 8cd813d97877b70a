"""The quantised blocks of a model in a folder: what save_pretrained is given in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from pyquant.io import LayerRecord
from pyquant.io.pretrained.save import record_of
from pyquant.ptq.shards.block_files import BlockFiles

KIND: Final = "quantised blocks"
_BETWEEN: Final = "|"  # a layer's name, and the field of its record


class Store(BlockFiles):
    """The source of what a model holds in its blocks, once each of them was added."""

    def __init__(self, folder: Path, facts: str) -> None:
        super().__init__(folder, KIND, facts)

    def add_layers(self, block: str, layers: Sequence[LayerRecord], others: Mapping[str, Tensor]) -> None:
        """Keeps a block: its quantised layers, and its other tensors by their names in the model."""
        tensors = {f"{_BETWEEN}{name}": tensor for name, tensor in others.items()}
        for layer in layers:
            held = {key: value for key, value in _fields(layer).items() if isinstance(value, Tensor)}
            tensors |= {f"{layer.name}{_BETWEEN}{key}": tensor for key, tensor in held.items()}
        self.add(block, tensors)

    def record(self, name: str, layer: Any) -> LayerRecord:
        """The record of a layer, of which an empty one is given; of one that is in no block, its own."""
        empty = record_of(name, layer)
        if not empty.codes.is_meta:
            return empty
        at = f"{name}{_BETWEEN}"
        names = [key for key in self.within(f"{at}codes") if key.startswith(at)]
        held: dict[str, Any] = {key.removeprefix(at): self.read(key) for key in names}
        return replace(empty, **held)

    def tensor(self, name: str) -> Tensor:
        """A tensor of a block that is in no quantised layer."""
        return self.read(f"{_BETWEEN}{name}")


def _fields(layer: LayerRecord) -> dict[str, Any]:
    return {field.name: getattr(layer, field.name) for field in fields(layer)}
