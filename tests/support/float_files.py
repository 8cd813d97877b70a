"""Float checkpoints as transformers writes them, models for them, and runs over them that stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().eval()


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return built(make)


def written(folder: Path, model: nn.Module, files: int = 2) -> Path:
    """As transformers writes it: an index, shards, tied tensors once."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is other for other in tensors.values()):
            tensors[name] = tensor
    homes = {name: f"model-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(homes.values()):
        held = {name: t.detach().contiguous() for name, t in tensors.items() if homes[name] == file}
        save_file(held, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Stop(BaseException):
    pass


def stopping_after(steps: int) -> Callable[[int, int, str], None]:
    left = steps

    def progress(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Stop

    return progress


_TO_BE_KILLED = """
import importlib, os, signal, sys
from pathlib import Path
run = importlib.import_module(sys.argv[1]).run
from pyquant.io import atomic
left = int(sys.argv[3])
ordinary = os.write
def write(fd, data):
    global left
    left -= 1
    if left == 0:
        ordinary(fd, bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return ordinary(fd, data)
os.write = write
run(Path(sys.argv[2]), "files")
"""


def killed_in_a_write(module: Path, folder: Path, writes: int) -> None:
    """run(folder, "files") of a test module, in a process that is killed in the middle of this write of files."""
    paths = map(str, (Path(__file__).resolve().parents[2], Path(__file__).parent, module.parent))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", _TO_BE_KILLED, module.stem, str(folder), str(writes)]
    killed = subprocess.run(command, env=environment, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
