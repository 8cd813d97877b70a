"""Safetensors files that lie, under a manifest whose digests fit the lie; and numbers that no layer may hold."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accept
import checkpoints
import pytest
import torch
from checkpoints import Forger, safetensors_bytes

from pyquant.errors import CheckpointError
from pyquant.io import load_checkpoint, save_checkpoint
from pyquant.io.shards import digest, encode

A, B = "blocks.0.fc1.bias", "blocks.0.fc1.weight_scale"  # both float32, 6 numbers
Header = dict[str, Any]


@pytest.fixture
def forger(tmp_path: Path) -> Forger:
    layers, tensors, extra = checkpoints.sample(1)
    save_checkpoint(tmp_path, layers, tensors, extra=extra)
    return Forger(tmp_path)


def _field(name: str, field: str, value: Any) -> Callable[[Header], None]:
    return lambda header: header[name].__setitem__(field, value)


def _swap_offsets(header: Header) -> None:
    header[A]["data_offsets"], header[B]["data_offsets"] = header[B]["data_offsets"], header[A]["data_offsets"]


def _overlap(header: Header) -> None:
    header[A]["data_offsets"] = header[B]["data_offsets"]


def _hole(header: Header) -> None:
    last = max(header, key=lambda n: header[n].get("data_offsets", [0])[0])
    del header[last]


HEADERS: dict[str, Callable[[Header], object]] = {
    "offsets swapped": _swap_offsets,
    "offsets overlap": _overlap,
    "hole": _hole,
    "reshape": _field("blocks.0.fc1.weight", "shape", [16, 6]),
    "flatten": _field("blocks.0.fc1.weight", "shape", [96]),
    "retype to unsigned": _field("blocks.0.fc1.weight", "dtype", "U8"),
    "retype to float": _field("scalar", "dtype", "I32"),
    "unknown type": _field(A, "dtype", "F33"),
    "type of sub-bytes": _field("blocks.0.fc1.weight", "dtype", "F4"),
    "shape of 2^63": _field(A, "shape", [2**63]),
    "shape of 2^64": _field(A, "shape", [2**64]),
    "shape that wraps": _field(A, "shape", [2**62, 4]),
    "shape negative": _field(A, "shape", [-6]),
    "offsets of 2^63": _field(A, "data_offsets", [0, 2**63]),
    "offsets upside down": _field(A, "data_offsets", [24, 0]),
    "offsets beyond the end": _field(A, "data_offsets", [2**40, 2**40 + 24]),
    "renamed": lambda header: header.update({"x": header.pop(A)}),
    "field missing": lambda header: header[A].pop("shape"),
    "metadata of numbers": lambda header: header.update(__metadata__={"format": 1}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_crafted_headers_are_refused(name: str, forger: Forger) -> None:
    header, body = forger.shard()
    before = json.dumps(header)
    HEADERS[name](header)
    assert json.dumps(header) != before
    forger.put_shard(safetensors_bytes(header, bytes(body)))
    forger.sign()
    with pytest.raises(CheckpointError, match=str(forger.directory)):
        load_checkpoint(forger.directory)


def _raw(forger: Forger) -> tuple[bytes, bytes]:
    data = (forger.directory / forger.shards[0]).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


FILES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "empty": lambda h, b: b"",
    "length alone": lambda h, b: struct.pack("<Q", 0),
    "header length 2^63": lambda h, b: safetensors_bytes(h, b, 2**63),
    "header length 2^64 - 1": lambda h, b: safetensors_bytes(h, b, 2**64 - 1),
    "header length 0": lambda h, b: safetensors_bytes(h, b, 0),
    "header one byte short": lambda h, b: safetensors_bytes(h, b, len(h) - 1),
    "header one byte long": lambda h, b: safetensors_bytes(h, b, len(h) + 1),
    "header no JSON": lambda h, b: safetensors_bytes(b"[" * len(h), b),
    "header no UTF-8": lambda h, b: safetensors_bytes(b"\xff" * len(h), b),
    "tensor repeated": lambda h, b: safetensors_bytes(h.rstrip()[:-1] + b',"scalar":' + _entry(h) + b"}", b),
    "bytes after the body": lambda h, b: safetensors_bytes(h, b + b"\0" * 8),
    "body short": lambda h, b: safetensors_bytes(h, b[:-1]),
    "no body": lambda h, b: safetensors_bytes(h, b""),
    "a pickle": lambda h, b: b"\x80\x04cos\nsystem\n(X\x04\0\0\0trueTR." + b"\0" * len(h + b),
    "a zip": lambda h, b: b"PK\x03\x04" + h + b,
}


def _entry(header: bytes) -> bytes:
    return json.dumps(json.loads(header)["scalar"]).encode()


@pytest.mark.parametrize("name", FILES)
def test_crafted_files_are_refused(name: str, forger: Forger) -> None:
    header, body = _raw(forger)
    forger.put_shard(FILES[name](header, body))
    for entry in forger.document["files"].values():
        entry["bytes"] = max(entry["bytes"], 0)
    forger.sign()
    with pytest.raises(CheckpointError):
        load_checkpoint(forger.directory)


def test_header_bombs_are_refused_within_ten_milliseconds(forger: Forger) -> None:
    header, body = _raw(forger)
    forger.put_shard(safetensors_bytes(header, body, 2**63))
    forger.sign()
    times = []
    for _ in range(5):
        start = time.process_time()
        with pytest.raises(CheckpointError):
            load_checkpoint(forger.directory)
        times.append(time.process_time() - start)
    assert min(times) < 0.010


NUMBERS: dict[str, tuple[str, bytes, str]] = {
    "scale NaN": (B, struct.pack("<6f", 1, 1, 1, 1, 1, float("nan")), "finite and > 0"),
    "all scales NaN": (B, struct.pack("<6f", *[float("nan")] * 6), "finite and > 0"),
    "scale infinite": (B, struct.pack("<6f", float("inf"), 1, 1, 1, 1, 1), "finite and > 0"),
    "scale zero": (B, struct.pack("<6f", 1, 0, 1, 1, 1, 1), "finite and > 0"),
    "scale minus zero": (B, struct.pack("<6f", 1, -0.0, 1, 1, 1, 1), "finite and > 0"),
    "scale negative": (B, struct.pack("<6f", 1, -1, 1, 1, 1, 1), "finite and > 0"),
    "code below the range": ("blocks.0.fc1.weight", b"\x80" + b"\0" * 95, "codes in"),
    "input scale NaN": ("blocks.1.fc1.input_scale", struct.pack("<f", float("nan")), "finite and > 0"),
    "shape tensor of other sizes": ("blocks.0.fc2.weight_shape", struct.pack("<2q", 24, 5), "weight_shape"),
    "shape tensor of 2^62": ("blocks.0.fc2.weight_shape", struct.pack("<2q", 2**62, 4), "weight_shape"),
    "padding of packed zero points set": ("blocks.0.fc2.weight_zero_point", b"\xff" * 12, "bits are set"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_valid_files_with_evil_numbers_are_refused(name: str, forger: Forger) -> None:
    tensor, data, words = NUMBERS[name]
    forger.put_tensor(tensor, data)
    forger.sign()
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(forger.directory)


def test_four_bit_codes_outside_the_narrow_range_are_refused(tmp_path: Path) -> None:
    layer = checkpoints.layer("fc", checkpoints.SCHEMES["W4A8 channel"], 2, 8, 1)
    save_checkpoint(tmp_path, [layer], {}, extra={})
    forger = Forger(tmp_path)
    forger.put_tensor("fc.weight_packed", b"\x00" * 8)  # code -8, which symmetric narrow codes never use
    forger.sign()
    with pytest.raises(CheckpointError, match=r"codes in \[-7, 7\]"):
        load_checkpoint(tmp_path)


def test_bits_in_the_padding_of_packed_codes_are_refused(tmp_path: Path) -> None:
    layer = checkpoints.layer("fc", checkpoints.SCHEMES["W8A16"], 2, 3, 1)
    save_checkpoint(tmp_path, [layer], {}, extra={})
    forger = Forger(tmp_path)
    forger.put_tensor("fc.weight_packed", b"\x80\x80\x80\x00\x80\x80\x80\x01")
    forger.sign()
    with pytest.raises(CheckpointError, match=r"'fc\.weight_packed': bits are set beyond column 3"):
        load_checkpoint(tmp_path)


def test_zero_point_outside_its_range_is_refused(tmp_path: Path) -> None:
    layer = checkpoints.layer("fc", checkpoints.SCHEMES["W4A4 affine"], 2, 8, 1)
    save_checkpoint(tmp_path, [layer], {}, extra={})
    forger = Forger(tmp_path)
    forger.put_tensor("fc.input_zero_point", b"\x08")
    forger.sign()
    with pytest.raises(CheckpointError, match=r"codes in \[-8, 7\]"):
        load_checkpoint(tmp_path)


def test_equal_tensors_give_equal_files_and_names() -> None:
    tensors = {"b": torch.arange(5), "a": torch.zeros(0, 3), "c": torch.tensor(1.5)}
    first, second = encode(tensors), encode(dict(reversed(tensors.items())))
    accept.t0(first[:2], second[:2])
    assert encode({**tensors, "b": torch.arange(5) + 1})[0] != first[0]


def test_digest_is_sha256_of_the_little_endian_bytes() -> None:
    import hashlib

    accept.t0(digest(torch.tensor([1, -2], dtype=torch.int16)), hashlib.sha256(b"\x01\x00\xfe\xff").hexdigest())
    accept.t0(digest(torch.empty(0)), hashlib.sha256(b"").hexdigest())
