"""Statistics of an unfinished calibration in a file that is whole at any moment, of one model and set of targets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pyquant.calibrate.statistics import RangeStatistics
from pyquant.errors import CheckpointError
from pyquant.io.atomic import SaveDirectory
from pyquant.io.shards import digest

FILE: Final = "calibration.safetensors"
VERSION: Final = "2"  # 1: padding of batches counted


class SavedStatistics:
    """The file, and how many batches it holds: done and saved; 0 where there is no file yet."""

    def __init__(self, folder: Path, key: str, collected: Mapping[str, Mapping[str, RangeStatistics]]) -> None:
        self._folder, self._key = folder, key
        self._statistics = {f"{name}/{role}": s for name, roles in collected.items() for role, s in roles.items()}
        self.batches = 0

    @staticmethod
    def open(
        folder: str | Path, model: nn.Module, collected: Mapping[str, Mapping[str, RangeStatistics]], num_batches: int
    ) -> SavedStatistics:
        """Loads what the folder holds into the statistics. CheckpointError for a damaged file, or one of another
        model, other targets or another num_batches."""
        progress = SavedStatistics(Path(folder), fingerprint(model, collected, num_batches), collected)
        path = Path(folder) / FILE
        if path.exists():
            progress._load(path)
        return progress

    def save(self, batches: int) -> None:
        """Writes everything, whole or not at all."""
        tensors = {
            f"{at}/{name}": tensor.cpu().contiguous()
            for at, statistics in self._statistics.items()
            for name, tensor in statistics.state_dict().items()
        }
        facts = {"version": VERSION, "key": self._key, "batches": str(batches), "digest": _digest(tensors)}
        with SaveDirectory(self._folder) as out:
            out.sweep(lambda name: False)  # what killed runs left half written
            out.publish(out.stage(safetensors.torch.save(tensors, facts)), FILE)
            out.sync()
        self.batches = batches

    def _load(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a calibration file: {error}") from error
        if facts.get("version") != VERSION or facts.get("digest") != _digest(tensors):
            raise CheckpointError(f"{path}: damaged, or from another version of pyquant; delete it to begin again")
        if facts.get("key") != self._key:
            what = "of another model, other layers or another num_batches"
            raise CheckpointError(f"{path}: {what}; delete it, or choose another folder")
        for at, statistics in self._statistics.items():
            own = {name.removeprefix(f"{at}/"): t for name, t in tensors.items() if name.rpartition("/")[0] == at}
            statistics.load_state_dict(own)
        self.batches = int(facts["batches"])


def fingerprint(model: nn.Module, collected: Mapping[str, Mapping[str, RangeStatistics]], num_batches: int) -> str:
    """SHA-256 of the model's tensors and names, the statistics asked for and num_batches."""
    hasher = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)} {digest(tensor.cpu())}\n".encode())
    for name in sorted(collected):
        for role, statistics in sorted(collected[name].items()):
            hasher.update(f"{name} {role} {type(statistics).__name__} {statistics.channel_axis}\n".encode())
    hasher.update(f"{num_batches}".encode())
    return hasher.hexdigest()


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(f"{name} {digest(tensors[name])}\n".encode())
    return hasher.hexdigest()
