"""What reading the largest manifests takes: cd tests && PYTHONPATH=.. python -m hostile.manifest_memory [CASE ...]

Each document is parsed in a fork; its figure is what the peak of resident memory grows by, without the document itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pyquant.errors import CheckpointError
from pyquant.io import strict_json
from pyquant.io.manifest import FileEntry, Manifest, TensorEntry, parse

# MiB. SECURITY.md tells both figures.
OF_60_000_TENSORS = 100
OF_ANY_MANIFEST = 300


def of_tensors(count: int, name: str = "model.layers.{}.mlp.weight", rank: int = 2) -> bytes:
    """A right manifest of that many tensors: it is read to its end."""
    digest = "0" * 64
    shard = f"model-{digest[:16]}.safetensors"
    entry = TensorEntry(shard, torch.int8, (8,) * rank, digest)
    return Manifest(
        {}, {}, {shard: FileEntry(64 * count, digest)}, {name.format(i): entry for i in range(count)}, {}
    ).to_bytes()


def of_lists() -> bytes:
    """As many lists as the parser's bounds allow, in as many bytes."""
    head = b'{"a":['
    lists = b"[]," * (strict_json.MAX_CONTAINERS - 4)
    return head + lists + b'"' + b"x" * (strict_json.MAX_BYTES - len(head) - len(lists) - 5) + b'"]}'


def of_keys() -> bytes:
    """As many keys, none of them twice."""
    return b"{" + b",".join(b'"%x":0' % i for i in range(strict_json.MAX_KEYS - 2)) + b"}"


def of_numbers() -> bytes:
    """Nothing bounds the numbers of a list but the bytes."""
    return b'{"a":[' + b"999," * (strict_json.MAX_BYTES // 4 - 4) + b"0]}"


def of_texts() -> bytes:
    """Nor the texts; one of two letters takes 51 bytes, and eight in the list."""
    return b'{"a":[' + b'"ab",' * (strict_json.MAX_BYTES // 5 - 4) + b"0]}"


CASES: dict[str, tuple[Callable[[], bytes], int]] = {
    "60 000 tensors": (lambda: of_tensors(60_000), OF_60_000_TENSORS),
    "the most tensors": (lambda: of_tensors(80_000, "{}", 0), OF_ANY_MANIFEST),
    "the most lists": (of_lists, OF_ANY_MANIFEST),
    "the most keys": (of_keys, OF_ANY_MANIFEST),
    "the most numbers": (of_numbers, OF_ANY_MANIFEST),
    "the most texts": (of_texts, OF_ANY_MANIFEST),
}


def peak() -> int:
    """Peak of this process's resident memory, bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def in_a_fork(work: Callable[[], bytes]) -> bytes:
    """What work() gives, done in a process whose memory is that of this one."""
    with tempfile.TemporaryFile() as told:
        pid = os.fork()
        if pid == 0:
            try:
                told.write(work())
                told.flush()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        told.seek(0)
        return told.read()


def grows_by(data: bytes) -> float:
    """MiB that parsing takes at its peak."""

    def work() -> bytes:
        before = peak()
        with contextlib.suppress(CheckpointError):
            parse(data)
        return str((peak() - before) / 2**20).encode()

    return float(in_a_fork(work))


def main(names: Sequence[str]) -> int:
    failed = 0
    for name in names or CASES:
        make, most = CASES[name]
        data = in_a_fork(make)  # what making it leaves behind would be room for what is read
        found = grows_by(data)
        failed += found > most
        print(f"{name}: {len(data) / 2**20:.1f} MiB of text, {found:.0f} MiB of memory (at most {most})", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
