"""Finished blocks in a folder: a run that was killed goes on after the last one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pyquant.calibrate.progress import fingerprint
from pyquant.core.paths import file_path
from pyquant.errors import CheckpointError
from pyquant.io.atomic import write_file
from pyquant.io.journal import Journal
from pyquant.io.shards import digest, parsed
from pyquant.ptq.blockwise.kept import Kept
from pyquant.ptq.blockwise.offload import Residence
from pyquant.ptq.blockwise.plan import Plan
from pyquant.ptq.blockwise.stage import LayerState, Stage
from pyquant.ptq.improve.matrix import Layer
from pyquant.simulate.fake_quantize import FakeQuantize

if TYPE_CHECKING:
    from typing_extensions import Self

JOURNAL: Final = "blocks.journal"
KIND: Final = "blocks"


class Saved:
    """A journal, and a safetensors file for each stage with what its layers became.

    folder    made where it is missing.     settings   what the results depend on besides the model and its data.
    residence   where blocks are that are not in memory: it gives them what was found whenever it brings them.
    Raises CheckpointError for a folder of another model, data or settings, and for damage.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        kept: Kept,
        plan: Plan,
        settings: str,
        residence: Residence | None = None,
    ) -> None:
        self._folder, self._residence = file_path("save_to", folder), residence
        hasher = hashlib.sha256()
        count = 0
        for chain in plan.chains:
            count = len(chain.batches)
            refs = sorted(ref for ref in chain.last_uses if ref[0] in ("first", "const"))
            for b in range(count):
                for key in ((which, b, ref) for ref in refs for which in ("float", "both")):
                    if key in kept:
                        hasher.update(f"{key} {digest(kept.get(key).cpu().contiguous())}\n".encode())
        names = " ".join(name for chain in plan.chains for name in chain.names)
        facts = {
            "model": fingerprint(model, {}, count) if residence is None else f"{residence.fingerprint} {count}",
            "data": hasher.hexdigest(),
            "blocks": hashlib.sha256(names.encode()).hexdigest(),
            "settings": settings,
        }
        self._journal = Journal(self._folder / JOURNAL, KIND, facts)
        if residence is not None:
            self._tell(residence, {name for chain in plan.chains for name in chain.names})

    def _tell(self, residence: Residence, blocks: Set[str]) -> None:
        try:
            for stage, entry in self._journal.entries.items():
                if stage in blocks:
                    residence.finished(stage, self._folder / _file(entry["sha256"]))
        except BaseException:
            self._journal.close()
            raise

    def __contains__(self, stage: str) -> bool:
        return stage in self._journal.entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def add(self, stage: Stage, results: Mapping[str, Any]) -> None:
        """Keeps what the layers of a finished stage are now, and what became of each, as JSON can hold it."""
        tensors: dict[str, Tensor] = {}
        names = {id(layer): name for name, layer in stage.layers.items()}
        for state in stage.before:
            now = LayerState.of(state.layer)
            for what in ("weight", "bias"):
                if getattr(now, what) is not getattr(state, what):
                    tensors[f"{names[id(state.layer)]}.{what}"] = getattr(now, what)
            rounds = now.fake.mode != "off" and not now.fake.follows and now.fake.is_calibrated
            is_found = self._residence is not None and rounds  # by a search, which would be made each time
            if now.fake is not state.fake or is_found:
                scale, zero_point = now.fake.qparams()
                tensors[f"{names[id(state.layer)]}.scale"] = scale
                if zero_point is not None:
                    tensors[f"{names[id(state.layer)]}.zero_point"] = zero_point
        data = safetensors.torch.save({k: t.detach().cpu().clone().contiguous() for k, t in tensors.items()})
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._folder / _file(sha256)
        write_file(path, data)
        self._journal.add(stage.name, {"sha256": sha256, "layers": dict(results)})
        if self._residence is not None and stage.is_block:
            self._residence.finished(stage.name, path)

    def restore(self, stage: Stage) -> dict[str, Any]:
        """Gives the layers of a finished stage what was found; -> what became of each."""
        entry = self._journal.entries[stage.name]
        results: dict[str, Any] = entry["layers"]
        if self._residence is None or not stage.is_block:
            put_found(found_in(self._folder / _file(entry["sha256"])), stage.layers)
        return results


def found_in(path: Path) -> dict[str, Tensor]:
    """What an improver found for the layers of a stage. Raises CheckpointError for a file that is not as it was."""
    try:
        data = path.read_bytes()
        if _file(hashlib.sha256(data).hexdigest()) != path.name:
            raise CheckpointError(f"{path}: damaged; allowed: the file as it was written")
        return {name: tensor.clone() for name, tensor in parsed(data).items()}  # memory of torch's own alignment
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: of a finished block: {error}") from error


def put_found(found: Mapping[str, Tensor], layers: Mapping[str, Layer]) -> None:
    """Gives layers, by their names, what was found for them."""
    for name, layer in layers.items():
        device = layer.weight.device
        for what in ("weight", "bias"):
            if (tensor := found.get(f"{name}.{what}")) is not None:
                setattr(layer, what, nn.Parameter(tensor.to(device), requires_grad=layer.weight.requires_grad))
        if (scale := found.get(f"{name}.scale")) is not None:
            fake = FakeQuantize(layer.scheme.weights, tuple(scale.shape), follows=False, device=device)
            fake.set_qparams(scale.to(device), found.get(f"{name}.zero_point"))
            layer.weight_fake_quant = fake.train(layer.training)


def _file(sha256: str) -> str:
    return f"block-{sha256[:16]}.safetensors"
