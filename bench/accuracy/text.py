"""Text that is on every machine: the sources of Python's standard library, as bytes below 128."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 128
_OTHER = bytes(range(VOCABULARY, 256))
_LIMIT = 3_000_000  # bytes of training text: more is read only once by the schedules here


@functools.lru_cache(maxsize=1)
def corpus() -> tuple[Tensor, Tensor]:
    """(training, held out) int64 [bytes]: whole files, every eighth held out; the same for one Python version.

    Raises RuntimeError where the standard library's sources are not installed.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, path in enumerate(files):
        parts[i % 8 == 7].append(path.read_bytes().translate(None, _OTHER))
    train, held_out = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8).long() for p in parts)
    if train.numel() < 1_000_000:
        raise RuntimeError(f"{len(files)} source files in {sysconfig.get_path('stdlib')}: the standard library is cut")
    return train[:_LIMIT], held_out


def windows(data: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """int64 [count, length]: windows at random places of a text."""
    starts = torch.randint(data.numel() - length, (count, 1), generator=generator, device="cpu")
    return data[starts + torch.arange(length, device="cpu")]
