"""Quantised blocks in a folder: a file for each, and a journal of those that are whole."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import safetensors.torch
import torch
from torch import Tensor, nn

from pyquant.errors import CheckpointError
from pyquant.io import LayerRecord
from pyquant.io.atomic import write_file
from pyquant.io.foreign.tensors import TensorFile
from pyquant.io.journal import Journal
from pyquant.io.pretrained.save import record_of
from pyquant.ptq.blockwise.saved import JOURNAL

if TYPE_CHECKING:
    from typing_extensions import Self

KIND: Final = "quantised blocks"
_BETWEEN: Final = "|"  # a layer's name, and the field of its record


class Store:
    """The source of what a model holds in its blocks, once each of them was added.

    folder  made where it is missing; facts: what its contents depend on.
    Raises CheckpointError for a folder of something else, and for files that are not as they were written.
    """

    def __init__(self, folder: Path, facts: str) -> None:
        self._folder, self._files = folder, dict[str, TensorFile]()
        self._home: dict[str, str] = {}  # by layers' names and tensors' names: the block
        self._journal = Journal(folder / JOURNAL, KIND, facts)
        try:
            for block, entry in self._journal.entries.items():
                path = self._path(entry["sha256"])
                if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
                    raise CheckpointError(f"{path}: damaged; allowed: the file as it was written")
                self._open(block, path)
        except OSError as error:
            self._journal.close()
            raise CheckpointError(f"{folder}: of a finished block: {error}") from error
        except BaseException:
            self._journal.close()
            raise

    def __contains__(self, block: str) -> bool:
        return block in self._journal.entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def add(self, block: str, layers: Sequence[LayerRecord], others: Mapping[str, Tensor]) -> None:
        """Keeps a block: its quantised layers, and its other tensors by their names in the model."""
        tensors = {f"{_BETWEEN}{name}": tensor for name, tensor in others.items()}
        for layer in layers:
            held = {key: value for key, value in _fields(layer).items() if isinstance(value, Tensor)}
            tensors |= {f"{layer.name}{_BETWEEN}{key}": tensor for key, tensor in held.items()}
        data = safetensors.torch.save({k: t.detach().cpu().clone().contiguous() for k, t in tensors.items()})
        sha256 = hashlib.sha256(data).hexdigest()
        write_file(self._path(sha256), data)
        self._journal.add(block, {"sha256": sha256})
        self._open(block, self._path(sha256))

    def record(self, name: str, layer: Any) -> LayerRecord:
        """The record of a layer, of which an empty one is given; of one that is in no block, its own."""
        empty = record_of(name, layer)
        if not empty.codes.is_meta:
            return empty
        file = self._files[self._home[name]]
        at = f"{name}{_BETWEEN}"
        held: dict[str, Any] = {key.removeprefix(at): file.read(key) for key in file.spans if key.startswith(at)}
        return replace(empty, **held)

    def tensor(self, name: str) -> Tensor:
        """A tensor of a block that is in no quantised layer."""
        return self._files[self._home[f"{_BETWEEN}{name}"]].read(f"{_BETWEEN}{name}")

    def _open(self, block: str, path: Path) -> None:
        file = self._files[block] = TensorFile(path)
        for key in file.spans:
            layer = key.partition(_BETWEEN)[0]
            self._home[layer or key] = block

    def _path(self, sha256: str) -> Path:
        return self._folder / f"codes-{sha256[:16]}.safetensors"


def _fields(layer: LayerRecord) -> dict[str, Any]:
    return {field.name: getattr(layer, field.name) for field in fields(layer)}


def other_tensors(block: nn.Module, name: str, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What of a block's state_dict is in none of these layers, by its name in the model."""
    inside = tuple(f"{layer}." for layer in layers)
    state = block.state_dict(prefix=f"{name}.")
    return {key: t for key, t in state.items() if isinstance(t, torch.Tensor) and not key.startswith(inside)}
