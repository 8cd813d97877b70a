"""What goes into the blocks of a model, kept in memory or in a folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pyquant.core.paths import file_path
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.atomic import write_file
from pyquant.io.shards import parsed
from pyquant.ptq.blockwise.calls import Ref

_FOLDER: Final = "a folder, or where one can be made"
Key = tuple[str, int, Ref]  # which pass ('float', 'rounded', 'both'), which batch, which tensor of its calls


def check_folder(path: Path) -> None:
    """Raise ArgumentError for a cache of this path that is a file, or below one."""
    if not next(one for one in (path, *path.parents) if one.exists()).is_dir():
        raise ArgumentError("cache", f"{path}: a file, or below one", _FOLDER)


class Kept:
    """Tensors by key. folder  where they lie, as safetensors files below a new folder of its own; None: in memory."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._tensors: dict[Key, Tensor | tuple[Path, torch.device]] = {}
        self._parent = None if folder is None else file_path("cache", folder)
        self._folder: Path | None = None  # made for the first tensor
        self._written = 0

    def put(self, key: Key, tensor: Tensor) -> None:
        """Keeps a tensor; one on the disk is contiguous when it comes back."""
        if self._parent is None:
            self._tensors[key] = tensor
            return
        if self._folder is None:
            try:
                self._parent.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix="pyquant-inputs-", dir=self._parent))
            except OSError as error:
                raise ArgumentError("cache", f"{self._parent}: {error.strerror}", _FOLDER) from error
        path = self._folder / f"{self._written:08d}.safetensors"
        self._written += 1
        try:
            data = safetensors.torch.save({"t": tensor.detach().cpu().clone().contiguous()})
        except (SafetensorError, KeyError, ValueError) as error:
            raise ArgumentError("cache", f"a folder, with inputs of {tensor.dtype} ({error})", "None") from error
        write_file(path, data)
        self._tensors[key] = path, tensor.device

    def get(self, key: Key) -> Tensor:
        """The tensor of a key, on the device that it came from; KeyError where there is none."""
        found = self._tensors[key]
        if isinstance(found, Tensor):
            return found
        path, device = found
        try:
            # a copy, as products of memory of another alignment may come out other by a rounding
            return parsed(path.read_bytes())["t"].to(device, copy=True)
        except (SafetensorError, KeyError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or gone while it was in use: {error}") from error

    def drop(self, key: Key) -> None:
        """Forgets a tensor; one that is not there is fine."""
        found = self._tensors.pop(key, None)
        if isinstance(found, tuple):
            found[0].unlink(missing_ok=True)

    def clear(self) -> None:
        """Forgets all."""
        for key in list(self._tensors):
            self.drop(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._tensors

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
