"""Float checkpoints as transformers writes them, models for them, and runs over them that stop."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from children import fork, wait
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


def killed_in_a_write(run: Callable[[Path, str], object], folder: Path, writes: int) -> None:
    """run(folder, "files") in a forked process that is killed in the middle of this write of files."""

    def work() -> None:
        left, ordinary = writes, os.write

        def write(fd: int, data: Any) -> int:
            nonlocal left
            left -= 1
            if left == 0:
                ordinary(fd, bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return ordinary(fd, data)

        os.write = write
        run(folder, "files")

    assert wait(fork(work)) == -signal.SIGKILL
