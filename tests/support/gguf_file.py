"""GGUF files for tests: a writer of the header, random blocks, and what their numbers are, one at a time."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ALIGNMENT = 32
KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
WIDTHS = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q6_K": (256, 210)}


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def word(value: Any) -> bytes:
    """A typed word: text, float, whole number, or a list of texts or of whole numbers."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    head = struct.pack("<IIQ", 9, 8 if isinstance(value[0], str) else 4, len(value))
    return head + b"".join(text(v) if isinstance(v, str) else struct.pack("<I", v) for v in value)


def write(path: Path, words: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """tensors  name -> (type, shape as torch has it, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(words))
    head += b"".join(text(key) + word(value) for key, value in words.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", KINDS[kind], len(body))
        body += data + b"\0" * (-len(data) % ALIGNMENT)
    path.write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + body)
    return path


def plain(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    kind = "F16" if tensor.dtype == torch.float16 else "F32"
    return kind, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def blocks(kind: str, n: int, k: int, seed: int) -> tuple[str, tuple[int, ...], bytes]:
    """Random codes and scales of either sign (of Q8_0 above zero); one block has a scale of zero."""
    g = torch.Generator().manual_seed(seed)
    elements, width = WIDTHS[kind]
    count = n * k // elements
    data = torch.randint(0, 256, (count, width), generator=g).to(torch.uint8)
    d = (torch.rand(count, generator=g) / 50 + 2.0**-8).half()
    if kind == "Q4_0":
        d = torch.where(torch.rand(count, generator=g) < 0.5, -d, d)
    d[0] = 0
    place = slice(208, 210) if kind == "Q6_K" else slice(0, 2)
    data[:, place] = d.view(torch.uint8).reshape(count, 2)
    if kind == "Q8_0":
        data[:, 2:][data[:, 2:] == 128] = 1
    return kind, (n, k), data.numpy().tobytes()


def numbers(kind: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    """The weights of blocks, number by number, from the layout's description."""
    _, width = WIDTHS[kind]
    found: list[float] = []
    for at in range(0, len(data), width):
        found += _BLOCK[kind](data[at : at + width])
    assert len(found) == shape[0] * shape[1]
    return torch.tensor(found, dtype=torch.float64).float().reshape(shape)


def _half(data: bytes) -> float:
    return float(struct.unpack("<e", data)[0])


def _signed(value: int) -> int:
    return value - 256 if value > 127 else value


def _q8_0(block: bytes) -> list[float]:
    return [_half(block[:2]) * _signed(byte) for byte in block[2:]]


def _q4_0(block: bytes) -> list[float]:
    d, packed = _half(block[:2]), block[2:]
    return [d * ((byte & 15) - 8) for byte in packed] + [d * ((byte >> 4) - 8) for byte in packed]


def _q6_k(block: bytes) -> list[float]:
    """As ggml's dequantize_row_q6_K goes through it: two halves, four quarters of 32 in each."""
    d, found = _half(block[208:]), [0.0] * 256
    for half in (0, 1):
        ql, qh, sc = block[64 * half :], block[128 + 32 * half :], block[192 + 8 * half :]
        for i in range(32):
            quarters = (
                (ql[i] & 15) | (qh[i] & 3) << 4,
                (ql[i + 32] & 15) | (qh[i] >> 2 & 3) << 4,
                ql[i] >> 4 | (qh[i] >> 4 & 3) << 4,
                ql[i + 32] >> 4 | (qh[i] >> 6 & 3) << 4,
            )
            for quarter, q in enumerate(quarters):
                scale = _signed(sc[i // 16 + 2 * quarter])
                found[128 * half + 32 * quarter + i] = d * scale * (q - 32)
    return found


_BLOCK = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q6_K": _q6_k}
