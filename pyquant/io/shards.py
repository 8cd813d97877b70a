"""Safetensors files with digests: the safetensors package writes and parses them, this file compares."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError

from pyquant.core.dtypes import describe, dtype_name
from pyquant.errors import CheckpointError
from pyquant.io.atomic import read_file
from pyquant.io.manifest import FileEntry, TensorEntry
from pyquant.io.strict_json import ascii_of, loads

_METADATA: Final = {"format": "pt"}  # without it transformers refuses the file


def encode(tensors: Mapping[str, torch.Tensor]) -> tuple[str, bytes, FileEntry, dict[str, TensorEntry]]:
    """A safetensors file of contiguous CPU tensors: its name, its bytes, its entry and the entries of its tensors.

    The first 64 bits of its SHA-256 give the name: other contents never overwrite it.
    """
    data = safetensors.torch.save(_unshared(tensors), metadata=_METADATA)
    file = FileEntry.of(data)
    name = f"model-{file.sha256[:16]}.safetensors"
    entries = {key: TensorEntry(name, t.dtype, tuple(t.shape), digest(t)) for key, t in tensors.items()}
    return name, data, file, entries


def decode(
    name: str, dir_fd: int, file: FileEntry, entries: Mapping[str, TensorEntry], where: str
) -> dict[str, torch.Tensor]:
    """The tensors of a shard, after size, SHA-256, names, types, shapes and SHA-256 of each tensor were compared.

    The bytes that were hashed are the bytes that are parsed: the file is read once. `where` is the directory.
    Raises CheckpointError naming file and tensor; OSError from the file system.
    """
    data = read_file(name, dir_fd=dir_fd, check=lambda size: check_size(f"{where}/{name}", size, file))
    check_digest(f"{where}/{name}", data, file)
    try:
        tensors = parsed(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
        raise CheckpointError(f"{where}/{name}: not a valid safetensors file: {str(error)[:200]}") from None
    _check_header(f"{where}/{name}", data)
    del data
    for key in sorted(set(tensors) ^ set(entries)):
        state = "is not in the manifest" if key in tensors else "is in the manifest and not in the file"
        raise CheckpointError(f"{where}/{name}: tensor '{key[:80]}' {state}")
    for key, entry in entries.items():
        tensor = tensors[key]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            got, allowed = describe(tensor), f"{dtype_name(entry.dtype)} {list(entry.shape)}"
            raise CheckpointError(f"{where}/{name}: tensor '{key}': got {got}; allowed: {allowed}")
        if digest(tensor) != entry.sha256:
            raise CheckpointError(f"{where}/{name}: tensor '{key}': its bytes do not have the SHA-256 of the manifest")
    return tensors


def parsed(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU; the package's own errors."""
    with torch.device("cpu"):  # it makes those of no elements on torch's default device
        return safetensors.torch.load(data)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of a contiguous CPU tensor, as 64 hexadecimal digits."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous whatever its stride, and cannot be viewed as bytes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def check_size(path: str, size: int, file: FileEntry) -> None:
    """Refuses a file of another size than the manifest says. Raises CheckpointError."""
    if size != file.size:
        raise CheckpointError(f"{path}: {size} bytes; allowed: the {file.size} that the manifest lists")


def check_digest(path: str, data: bytes, file: FileEntry) -> None:
    """Refuses other bytes than the manifest says. Raises CheckpointError."""
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise CheckpointError(f"{path}: its bytes do not have the SHA-256 of the manifest; it was damaged or altered")


def _check_header(path: str, data: bytes) -> None:
    """Refuses a header that says something twice or more than we write; its offsets were the parser's business."""
    text = data[8 : 8 + int.from_bytes(data[:8], "little")].decode("utf-8", "replace")
    header = loads(ascii_of(text), path)
    if header.get("__metadata__") != _METADATA:
        raise CheckpointError(f"{path}: metadata {str(header.get('__metadata__'))[:80]}; allowed: {_METADATA}")


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors that are views of something larger or of each other, which safetensors refuses to write."""
    seen: set[int] = set()
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_own = storage.nbytes() == tensor.numel() * tensor.itemsize and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        copies[name] = tensor if is_own else tensor.clone()
    return copies
