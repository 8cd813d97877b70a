"""Checkpoints for tests: random valid layers of every scheme, a fingerprint to compare by, and forged files."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pyquant.core.presets import (
    FP16,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A16,
    W4A4Dynamic,
    W4A8Dynamic,
    W8A8Dynamic,
    preset_name,
)
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.io import Checkpoint, LayerRecord
from pyquant.io.strict_json import lines, pretty

_STATIC = TensorScheme(granularity="per_tensor")
SCHEMES: dict[str, QScheme] = {
    "W8A8": W8A8(),
    "W8A8 affine": W8A8(symmetric_inputs=False),
    "W8A8Dynamic": W8A8Dynamic(),
    "W8A8Dynamic affine": W8A8Dynamic(symmetric_inputs=False),
    "W4A8 g8": W4A8(8),
    "W4A8 channel": W4A8(None),
    "W4A8Dynamic g8": W4A8Dynamic(8),
    "W4A4": W4A4(),
    "W4A4 affine": W4A4(symmetric_inputs=False),
    "W4A4Dynamic g4": W4A4Dynamic(4),
    "W8A16": W8A16(),
    "W8A16 affine g4": W8A16(4, symmetric=False),
    "W4A16 g8": W4A16(8),
    "W4A16 affine g8": W4A16(8, symmetric=False),
    "W4A16 affine channel": W4A16(None, symmetric=False),
    "FP16": FP16(),
    "BF16": FP16("bfloat16"),
    "codes out": QScheme(TensorScheme(granularity="per_channel"), _STATIC, _STATIC),
    "affine codes out": QScheme(
        TensorScheme(granularity="per_channel"), _STATIC, TensorScheme(symmetric=False, granularity="per_tensor")
    ),
    "per tensor": QScheme(TensorScheme(), _STATIC),
    "per tensor affine weights": QScheme(TensorScheme(bits=4, symmetric=False)),
    "full range": QScheme(
        TensorScheme(granularity="per_channel", narrow_range=False),
        TensorScheme(granularity="per_token", dynamic=True, narrow_range=False),
    ),
}


def layer(name: str, scheme: QScheme, n: int, k: int, seed: int, **changes: Any) -> LayerRecord:
    """A valid random layer; both limits of the codes occur where there is room."""
    g = torch.Generator().manual_seed(seed)

    def codes(limits: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = torch.randint(limits[0], limits[1] + 1, shape, generator=g).to(dtype)
        if found.numel() > 1:
            found.view(-1)[0], found.view(-1)[-1] = limits
        return found

    def qparams(prefix: str, one: TensorScheme | None, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        if one is None or one.dynamic or one.bits == 16:
            return {}
        found = {f"{prefix}_scale": torch.rand(shape, generator=g) + 2.0**-20}
        if not one.symmetric:
            found[f"{prefix}_zero_point"] = codes(one.code_range, shape, torch.int32)
        return found

    w = scheme.weights
    if scheme.is_float:
        weights = torch.randn(n, k, generator=g).to(getattr(torch, str(scheme.float_dtype)))
    else:
        weights = codes(w.code_range, (n, k), torch.int8)
    shape = {"per_tensor": (1,), "per_channel": (n,)}.get(w.granularity) or (n, k // (w.group_size or 1))
    fields: dict[str, Any] = {"name": name, "scheme": scheme.to_dict(), "in_features": k, "out_features": n}
    fields |= {"codes": weights, "weight_scale": None} | qparams("weight", w, shape)
    fields |= qparams("input", scheme.inputs, (1,)) | qparams("output", scheme.outputs, (1,))
    return LayerRecord(**(fields | changes))


def _other_calibrator(part: TensorScheme) -> TensorScheme:
    return replace(part, calibrator={"max": "mse", "mse": "max"}.get(part.calibrator, part.calibrator))


def _told(scheme: QScheme) -> str:
    """In the words of the first version, which fixtures keep for ever."""
    outputs = "" if scheme.outputs is None else f", outputs={scheme.outputs}"
    weights, inputs = scheme.weights, scheme.inputs
    named = scheme
    if weights.symmetric and weights.bits < 8:  # whose presets had the maximum then
        named = replace(named, weights=_other_calibrator(weights))
    if inputs is not None and not inputs.dynamic and inputs.bits < 8:  # likewise
        named = replace(named, inputs=_other_calibrator(inputs))
    return preset_name(named) or f"QScheme(weights={scheme.weights}, inputs={scheme.inputs or 'float'}{outputs})"


def sample(seed: int) -> tuple[list[LayerRecord], dict[str, torch.Tensor], dict[str, Any]]:
    """A small model of five layers; other seeds differ in every tensor and in `extra`, odd ones in schemes too."""
    g = torch.Generator().manual_seed(seed)
    second = SCHEMES["W4A16 affine g8"] if seed % 2 else SCHEMES["W4A8 g8"]
    layers = [
        layer("blocks.0.fc1", SCHEMES["W8A8Dynamic"], 6, 16, seed, bias=torch.randn(6, generator=g), activation="gelu"),
        layer("blocks.0.fc2", second, 5, 24, seed + 1000, bias=torch.randn(5, generator=g).half()),
        layer("blocks.1.fc1", SCHEMES["W8A8 affine"], 4, 9, seed + 2000, activation="clamp", clamp=(0.0, 6.0)),
        layer("embed", SCHEMES["W8A16"], 7, 5, seed + 3000, kind="embedding"),
        layer("head", SCHEMES["BF16"], 3, 4, seed + 4000),
    ]
    tensors = {
        "norm.weight": torch.randn(4, generator=g),
        "position.weight": torch.randn(3, 4, generator=g).bfloat16(),
        "mask": torch.randint(0, 2, (5,), generator=g).bool(),
        "scalar": torch.tensor(float(seed)),
    }
    return layers, tensors, {"seed": seed, "recipe": {"default": {"scheme": "W8A8"}}}


def fingerprint(checkpoint: Checkpoint) -> tuple[object, ...]:
    """Everything a checkpoint holds, bit by bit, in a form that accept.t0 compares."""
    return contents(checkpoint.layers, checkpoint.tensors, checkpoint.extra)


def contents(
    layers: Sequence[LayerRecord], tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]
) -> tuple[object, ...]:
    """The fingerprint of what is going to be saved."""
    told = [tuple((f, _value(getattr(one, f))) for f in one.__dataclass_fields__) for one in layers]
    return (
        tuple(sorted(told, key=repr)),
        tuple((name, _value(tensors[name])) for name in sorted(tensors)),
        json.dumps(dict(extra), sort_keys=True),
    )


def spelled_out(checkpoint: Checkpoint) -> dict[str, Any]:
    """The same as numbers that a person can read and any version can compare: integers, and floats in hexadecimal."""
    layers = {
        one.name: {
            f: _numbers(getattr(one, f))
            for f in one.__dataclass_fields__
            if f not in ("name", "scheme") and (f != "geometry" or one.geometry is not None)
        }
        | {"scheme": _told(QScheme.from_dict(one.scheme))}
        for one in checkpoint.layers
    }
    tensors = {name: _numbers(t) for name, t in checkpoint.tensors.items()}
    return {"layers": layers, "tensors": tensors, "extra": dict(checkpoint.extra)}


def _numbers(value: object) -> object:
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)
        numbers = [v.hex() if isinstance(v, float) else int(v) for v in flat.tolist()]
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": numbers}
    return list(value) if isinstance(value, tuple) else value


def _value(value: object) -> object:
    if isinstance(value, torch.Tensor):
        flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), data)
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


def write_in_place(path: Path, data: bytes) -> None:
    """Replaces the contents of a file without a rename, as damage does."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CREAT)
    os.write(fd, data)
    os.close(fd)


class Forger:
    """Rewrites a checkpoint as an attacker would who knows the format: every digest fits the forged contents again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.document = json.loads((directory / "manifest.json").read_bytes())
        self.shards = [name for name in self.document["files"] if name.startswith("model-")]

    def shard(self, index: int = 0) -> tuple[dict[str, Any], bytearray]:
        """Header and body of a safetensors file."""
        data = (self.directory / self.shards[index]).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        return json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])

    def put_shard(self, data: bytes, index: int = 0) -> None:
        """Other bytes for a shard, with file name, size and digests of file and tensors to match where they can."""
        old = self.shards[index]
        digest = hashlib.sha256(data).hexdigest()
        new = f"model-{digest[:16]}.safetensors"
        (self.directory / old).unlink()
        (self.directory / new).write_bytes(data)
        del self.document["files"][old]
        self.document["files"][new] = {"bytes": len(data), "sha256": digest}
        self.shards[index] = new
        for body in self.document["tensors"].values():
            body["file"] = new if body["file"] == old else body["file"]

    def put_tensor(self, name: str, data: bytes) -> None:
        """Other bytes of the same length for one tensor, all digests renewed."""
        index = self.shards.index(self.document["tensors"][name]["file"])
        header, body = self.shard(index)
        start, end = header[name]["data_offsets"]
        assert end - start == len(data)
        body[start:end] = data
        self.document["tensors"][name]["sha256"] = hashlib.sha256(data).hexdigest()
        self.put_shard(safetensors_bytes(header, bytes(body)), index)

    def sign(self, *, derive: bool = True) -> None:
        """Writes manifest.json (and, with derive, the files that follow from it) with fitting digests."""
        document = self.document
        if derive:
            total = sum(_size(t) for t in document["tensors"].values())
            weight_map = {name: t["file"] for name, t in document["tensors"].items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            for name, content in (("config.json", document["config"]), ("model.safetensors.index.json", index)):
                data = pretty(content)
                (self.directory / name).write_bytes(data)
                document["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        document.pop("sha256", None)
        document["sha256"] = hashlib.sha256(lines(document)).hexdigest()
        (self.directory / "manifest.json").write_bytes(lines(document))


def safetensors_bytes(header: Mapping[str, Any] | bytes, body: bytes, length: int | None = None) -> bytes:
    """A safetensors file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def _size(tensor: Mapping[str, Any]) -> int:
    widths = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}
    size = widths.get(str(tensor["dtype"]), 1)
    for extent in tensor["shape"] if isinstance(tensor["shape"], list) else []:
        size *= extent if isinstance(extent, int) else 1
    return size
