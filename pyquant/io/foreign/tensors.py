"""Safetensors files of others, a tensor at a time: a bounded header, then reads of what it names; nothing is mapped."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from pyquant.errors import CheckpointError
from pyquant.io.atomic import reason_of
from pyquant.io.manifest import DTYPES, MAX_FILE_BYTES
from pyquant.io.record import NAMES, is_safe_name
from pyquant.io.strict_json import MAX_BYTES, ascii_of, loads

_METADATA: Final = "__metadata__"
_MAX_RANK: Final = 8
_ALIGNMENT: Final = 64


@dataclass(frozen=True)
class Span:
    """Type and shape of a tensor, and where its bytes begin in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape, start=self.dtype.itemsize)


class BytesOf:
    """A regular file that is read in pieces while it stays as it was.

    Raises CheckpointError for what is no regular file, or was changed since it was first looked at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: tuple[int, ...] = ()
        self.size = 0
        fd = self._open()
        os.close(fd)

    def read(self, start: int, size: int) -> bytearray:
        """The bytes from start to start + size."""
        if not 0 <= start <= start + size <= self.size:
            raise CheckpointError(f"{self.path}: bytes {start} to {start + size}; allowed: the file's {self.size}")
        fd = self._open()
        try:
            data = bytearray(size)
            view, done = memoryview(data), 0
            while done < size and (count := os.preadv(fd, [view[done:]], start + done)):
                done += count
            self._check(fd, done == size)
            return data
        except MemoryError:
            raise CheckpointError(f"{self.path}: {size} bytes, for which there is no memory") from None
        except OSError as error:
            raise CheckpointError(f"{self.path}: {reason_of(error)}") from None
        finally:
            os.close(fd)

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        except OSError as error:
            raise CheckpointError(f"{self.path}: {reason_of(error)}") from None
        try:
            self._check(fd, True)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check(self, fd: int, is_whole: bool) -> None:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{self.path}: not a regular file; allowed: a regular file")
        state = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        self._state, self.size = self._state or state, info.st_size
        if state != self._state or not is_whole:
            raise CheckpointError(f"{self.path}: changed while being read; allowed: a file at rest")


class TensorFile:
    """The header of a safetensors file, and its tensors one by one.

    spans     name -> Span.
    metadata  text by name, as the file carries it.
    Raises CheckpointError naming file, tensor, what was found and what is allowed; nothing else.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = BytesOf(path)
        self.spans, self.metadata = _header(path, self._bytes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own."""
        span = self.spans[name]
        return as_tensor(self._bytes.read(span.start, span.size), span.dtype, span.shape)


def as_tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes as a tensor: over the same memory where that begins as torch's own does."""
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    if tensor.data_ptr() % _ALIGNMENT:  # products of other alignments may come out other by a rounding
        tensor = tensor.clone()
    return tensor.view(dtype).reshape(shape)


def words_of(data: bytes | bytearray, where: str) -> dict[str, Any]:
    """A JSON object from bytes that another program wrote: as strict_json, but UTF-8."""
    try:
        text = bytes(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: byte {error.start} is not UTF-8; allowed: JSON in UTF-8") from None
    return loads(ascii_of(text), where)


def _header(path: Path, file: BytesOf) -> tuple[dict[str, Span], dict[str, str]]:
    size = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else -1
    limit = min(MAX_BYTES, file.size - 8)
    if not 2 <= size <= limit:
        raise CheckpointError(f"{path}: a header of {size} bytes; allowed: 2 to {limit}")
    words = words_of(file.read(8, size), f"{path}")
    metadata = words.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: {_METADATA} is not an object of texts")
    base, end = 8 + size, 0
    spans = {name: _span(path, name, body, base) for name, body in words.items()}
    for name, span in sorted(spans.items(), key=lambda pair: (pair[1].start, pair[1].size)):
        if span.start != base + end:
            raise CheckpointError(
                f"{path}: tensor '{name}' begins at {span.start - base}; allowed: {end}, without gaps"
            )
        end += span.size
    if base + end != file.size:
        raise CheckpointError(f"{path}: tensors of {end} bytes; allowed: the {file.size - base} after the header")
    return spans, metadata


def _span(path: Path, name: str, body: object, base: int) -> Span:
    where = f"{path}: tensor {name[:80]!r}"
    if not is_safe_name(name):
        raise CheckpointError(f"{where}; allowed: {NAMES}")
    if not isinstance(body, dict) or set(body) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: not an object of dtype, shape and data_offsets")
    if not isinstance(body["dtype"], str) or body["dtype"] not in DTYPES:
        raise CheckpointError(f"{where}: type {str(body['dtype'])[:40]!r}; allowed: {' '.join(DTYPES)}")
    shape, offsets = body["shape"], body["data_offsets"]
    if not _are_sizes(shape) or len(shape) > _MAX_RANK or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape {str(shape)[:80]}, data_offsets {str(offsets)[:80]}; allowed: sizes")
    span = Span(DTYPES[body["dtype"]], tuple(shape), base + offsets[0])
    if span.size != offsets[1] - offsets[0] or span.size > MAX_FILE_BYTES:
        raise CheckpointError(f"{where}: data_offsets {offsets}; allowed: {span.size} bytes, as type and shape say")
    return span


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= MAX_FILE_BYTES for v in value)
