"""Rivals: what other packages make of the same model, each in a process of its own that may have another Python.

    python -m bench.lm.peers JOB.json        what measure_peer starts; prints one line of JSON

They write weights that a float model can hold (or run their own layers), and are judged on the same windows by the same
code. A package that cannot be imported is told, not left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from bench.lm.measure import Cell, _now, peak_memory, state_bytes
from bench.lm.subject import LmOptions, language_model
from pyquant.errors import ArgumentError

_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """A rival in one setting.

    package  its distribution.    module   what is imported.
    scheme   the format, by the name of the preset whose row it stands beside.
    apply    (model, calibration windows [T], folder of the model) -> the model to judge.
    needs_data   False: every draw gives the same model.
    """

    package: str
    module: str
    scheme: str
    apply: Callable[[nn.Module, list[Any], Path], nn.Module]
    needs_data: bool = True


@dataclass(frozen=True)
class PeerJob:
    """What the other process is told."""

    peer: str
    folder: str
    text: str
    calibration: str | None
    cloze: str | None
    options: LmOptions
    draw: int
    threads: int


def _torchao(model: nn.Module, config: Any) -> nn.Module:
    from torchao.quantization import quantize_

    quantize_(model, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and not name.endswith("lm_head"))
    return model


def _torchao_w8a8(model: nn.Module, data: list[Any], folder: Path) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return _torchao(model, Int8DynamicActivationInt8WeightConfig())


def _torchao_w4a16(model: nn.Module, data: list[Any], folder: Path) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return _torchao(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128)))


def _torchao_w4a8(model: nn.Module, data: list[Any], folder: Path) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerGroup

    return _torchao(
        model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(128))
    )


def _llm_compressor(scheme: str) -> Callable[[nn.Module, list[Any], Path], nn.Module]:
    def apply(model: nn.Module, data: list[Any], folder: Path) -> nn.Module:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier

        ids = torch.cat(data)
        rows = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
        oneshot(
            model=model,
            dataset=Dataset.from_dict(rows),
            recipe=[GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])],
            max_seq_length=ids.shape[1],
            num_calibration_samples=len(ids),
        )
        return model

    return apply


def _auto_round(iters: int) -> Callable[[nn.Module, list[Any], Path], nn.Module]:
    def apply(model: nn.Module, data: list[Any], folder: Path) -> nn.Module:
        from auto_round import AutoRound
        from transformers import AutoTokenizer

        rows = [row[None] for row in torch.cat(data)]
        found = AutoRound(
            model,
            AutoTokenizer.from_pretrained(folder),
            scheme="W4A16",
            group_size=128,
            sym=True,
            iters=iters,
            dataset=rows,
            nsamples=len(rows),
            seqlen=rows[0].shape[1],
            batch_size=4,
            device_map="cpu",
        )
        return found.quantize()[0]

    return apply


def _gptqmodel(model: nn.Module, data: list[Any], folder: Path) -> nn.Module:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in torch.cat(data)]
    loaded = GPTQModel.load(str(folder), QuantizeConfig(bits=4, group_size=128))
    loaded.quantize(rows, batch_size=4)
    with tempfile.TemporaryDirectory() as out:
        loaded.save(out)
        return GPTQModel.load(out, backend=BACKEND.TORCH).model


# A new one is a line.
PEERS: Final[dict[str, Peer]] = {
    "torchao, int8 dynamic": Peer("torchao", "torchao", "W8A8Dynamic", _torchao_w8a8, False),
    "torchao, int4 g128": Peer("torchao", "torchao", "W4A16", _torchao_w4a16, False),
    "torchao, int4 g128, int8 dynamic": Peer("torchao", "torchao", "W4A8Dynamic", _torchao_w4a8, False),
    "llm-compressor, GPTQ g128": Peer("llmcompressor", "llmcompressor", "W4A16", _llm_compressor("W4A16")),
    "GPTQModel, g128": Peer("gptqmodel", "gptqmodel", "W4A16", _gptqmodel),
    "AutoRound, g128": Peer("auto-round", "auto_round", "W4A16", _auto_round(200)),
}


def interpreters(words: list[str]) -> Mapping[str, str]:
    """{package: Python} of words 'package=python'. Raises ArgumentError for anything else."""
    known, found = {peer.package for peer in PEERS.values()}, {}
    for word in words:
        package, _, python = word.partition("=")
        if package not in known or not python:
            raise ArgumentError("peers-python", repr(word), f"PACKAGE=PYTHON, of {', '.join(sorted(known))}")
        if not os.access(python, os.X_OK):
            raise ArgumentError("peers-python", f"{python}: no program", "the Python of an environment")
        found[package] = python
    return found


def measure_peer(job: PeerJob, python: str) -> tuple[Cell | None, str]:
    """(what the rival's process measured, its version), or (None, why there is nothing)."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "job.json"
        told.write_text(json.dumps(asdict(job)))
        program = [python, "-m", "bench.lm.peers", str(told)]
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            program, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
        )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        told_last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return None, f"failed: {told_last}"[:300]
    answer = json.loads(lines[-1])
    return (None, answer["reason"]) if "reason" in answer else (Cell(**answer["cell"]), answer["version"])


def _answer(job: PeerJob) -> dict[str, Any]:
    import importlib
    import importlib.metadata

    peer = PEERS[job.peer]
    try:
        importlib.import_module(peer.module)
    except ImportError as error:
        installed = importlib.util.find_spec(peer.module) is not None
        return {"reason": f"cannot be imported: {error}" if installed else "not installed"}
    torch.set_num_threads(job.threads)
    subject = language_model(job.folder, job.text, calibration=job.calibration, cloze=job.cloze, options=job.options)
    model, data = subject.make(), subject.batches(job.draw)
    with peak_memory(next(model.parameters()).device) as peak:
        before = _now()
        model = peer.apply(model, data, Path(job.folder))
        seconds = _now() - before
    found = subject.judge(model.eval(), None)
    cell = Cell(found.losses, found.hits, seconds, peak[0] if peak else None, state_bytes(model))
    return {"cell": asdict(cell), "version": f"{peer.package} {importlib.metadata.version(peer.package)}"}


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text())
    answer = _answer(PeerJob(**{**told, "options": LmOptions(**told["options"])}))
    print(json.dumps(answer))
