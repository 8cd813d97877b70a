"""The header of a GGUF file: its words and where its tensors lie, from untrusted bytes."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyquant.errors import CheckpointError
from pyquant.io.foreign.tensors import BytesOf
from pyquant.io.record import NAMES, is_safe_name

MAX_HEADER: Final = 2**27  # bytes; a vocabulary takes a tenth of it
_MAX_COUNT: Final = 2**22  # words, tensors, elements of a list
_MAX_TEXT: Final = 2**20
_MAX_LAYERS: Final = 4096  # numbers of a list that may say something of each layer
_PIECE: Final = 2**20
_VERSIONS: Final = (2, 3)
_TEXT, _LIST = 8, 9
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
# type: (name, elements of a block, bytes of a block)
TYPES: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    8: ("Q8_0", 32, 34),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_OTHERS: Final = {
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    15: "Q8_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
}


@dataclass(frozen=True)
class Block:
    """A tensor of the file: its type, its shape as torch has it (last dimension fastest), and where it begins."""

    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """words    numbers and texts of the file, short lists of numbers as tuples, others as ().   tensors  by name."""

    words: dict[str, Any]
    tensors: dict[str, Block]


class _Cursor:
    """Goes through the beginning of a file, a piece of it in memory."""

    def __init__(self, file: BytesOf) -> None:
        self.file, self.at = file, 0
        self._start, self._piece = 0, bytearray()

    def take(self, size: int) -> bytes:
        limit = min(MAX_HEADER, self.file.size)
        if self.at + size > limit:
            raise CheckpointError(f"{self.file.path}: a header beyond {limit} bytes; allowed: up to there")
        if self.at + size > self._start + len(self._piece):
            self._start = self.at
            self._piece = self.file.read(self.at, min(max(size, _PIECE), limit - self.at))
        start = self.at - self._start
        self.at += size
        return bytes(self._piece[start : start + size])

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self, limit: int, what: str) -> int:
        found = int(self.number("Q"))
        if found > limit:
            raise CheckpointError(f"{self.file.path}: {found} {what}; allowed: at most {limit}")
        return found

    def text(self) -> str:
        return self.take(self.count(_MAX_TEXT, "bytes of text")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A number, a text, or a short list of numbers as a tuple; another list is passed over, and is ()."""
        if kind == _TEXT:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _LIST:
            raise CheckpointError(f"{self.file.path}: a word of type {kind}; allowed: 0 to 12")
        inner, count = self.number("I"), self.count(_MAX_COUNT, "elements of a list")
        if inner in _NUMBERS and count <= _MAX_LAYERS:
            return tuple(self.number(_NUMBERS[inner]) for _ in range(count))
        if inner in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[inner]}"))
        elif inner == _TEXT:
            for _ in range(count):
                self.skip(self.count(_MAX_TEXT, "bytes of text"))
        else:
            raise CheckpointError(f"{self.file.path}: a list of type {inner}; allowed: numbers and texts")
        return ()

    def skip(self, size: int) -> None:
        if self.at + size > min(MAX_HEADER, self.file.size):
            raise CheckpointError(f"{self.file.path}: a header beyond its bytes; allowed: {self.file.size}")
        self.at += size


def read_header(file: BytesOf) -> Header:
    """The header. Raises CheckpointError naming the file, what was found and what is allowed; nothing else."""
    cursor, path = _Cursor(file), file.path
    if file.size < 24 or cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{path}: no GGUF file")
    version = cursor.number("I")
    if version in (v << 24 for v in _VERSIONS):
        raise CheckpointError(f"{path}: big-endian; allowed: little-endian files")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: version {version}; allowed: {' or '.join(map(str, _VERSIONS))}")
    tensors, pairs = cursor.count(_MAX_COUNT, "tensors"), cursor.count(_MAX_COUNT, "words")
    said: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text()
        value = cursor.value(cursor.number("I"))
        if key in said:
            raise CheckpointError(f"{path}: the word {key[:80]!r} twice")
        said[key] = value
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = said.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**16:
        raise CheckpointError(f"{path}: alignment {str(alignment)[:40]}; allowed: 1 to 65536")
    base = -(-cursor.at // alignment) * alignment
    return Header(said, _placed(path, infos, base, file.size))


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    rank = cursor.number("I")
    if not is_safe_name(name) or rank > 4:
        raise CheckpointError(f"{cursor.file.path}: tensor {name[:80]!r} of {rank} dimensions; allowed: 4, {NAMES}")
    shape = tuple(reversed([cursor.number("Q") for _ in range(rank)]))
    return name, shape, cursor.number("I"), cursor.number("Q")


def _placed(path: Path, infos: list[tuple[str, tuple[int, ...], int, int]], base: int, size: int) -> dict[str, Block]:
    found: dict[str, Block] = {}
    for name, shape, kind, offset in infos:
        where = f"{path}: tensor '{name}'"
        if name in found:
            raise CheckpointError(f"{where}: twice")
        if kind not in TYPES:
            why = "offsets that are real numbers, or tables" if kind in _OTHERS else "a type that pyquant does not know"
            known = ", ".join(one[0] for one in TYPES.values())
            raise CheckpointError(
                f"{where}: {_OTHERS.get(kind, f'type {kind}')}, {why}: no exact map; allowed: {known}"
            )
        word, elements, width = TYPES[kind]
        if (shape[-1] if shape else 1) % elements:
            raise CheckpointError(f"{where}: rows of {shape[-1]}; allowed: multiples of {elements} with {word}")
        found[name] = Block(word, shape, base + offset, math.prod(shape) // elements * width)
    end = base
    for name, block in sorted(found.items(), key=lambda pair: (pair[1].start, pair[1].size)):
        if block.start < end or block.start + block.size > size:
            got = f"bytes {block.start} to {block.start + block.size}"
            raise CheckpointError(f"{path}: tensor '{name}': {got}; allowed: {end} to {size}")
        end = block.start + block.size
    return found
