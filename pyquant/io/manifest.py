"""manifest.json: what a checkpoint consists of, with the SHA-256 of every file, every tensor and of itself.

It is the only file the loader trusts, and trusts only after all of its own checks; everything else is compared with it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.compressed_tensors import tensor_specs
from pyquant.io.record import GEOMETRY, NAMES, LayerEntry, check_entry, is_plain_name, is_safe_name
from pyquant.io.strict_json import lines, loads, pretty

VERSION: Final = 3  # 2: convolutions; 3: names with other characters; a model is written as the oldest that can say it
FILE: Final = "manifest.json"
CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SHARD: Final = re.compile(r"model-[0-9a-f]{16}\.safetensors")
MAX_FILE_BYTES: Final = 2**63 - 1

DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = ("config", "extra", "files", "format", "layers", "pending", "sha256", "tensors", "version")
_LAYER_KEYS: Final = ("activation", "bias", "clamp", "in_features", "kind", "out_features", "scheme")
_INFINITIES: Final = {"inf": float("inf"), "-inf": float("-inf")}
_MAX_RANK: Final = 32


def is_digest(value: object) -> bool:
    """Whether this is a SHA-256 as 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str

    @staticmethod
    def of(data: bytes) -> FileEntry:
        """The entry of these bytes."""
        return FileEntry(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class TensorEntry:
    """File, type, shape and SHA-256 of the bytes of a tensor (little endian, row major)."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape, start=self.dtype.itemsize)


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint consists of.

    config, extra  contents of config.json, and what the caller stored with the tensors.
    files          the shards, by name; config.json and the index follow from `config` and `tensors`.
    tensors        by name.   layers  by name.
    pending        {} in a finished checkpoint. While a save replaces config.json and the index (their names must stay
                   the same for other tools): the SHA-256 that each had before, or None where there was none.
    """

    config: Mapping[str, Any]
    extra: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    layers: Mapping[str, LayerEntry]
    pending: Mapping[str, str | None] = field(default_factory=dict)

    def config_bytes(self) -> bytes:
        """The bytes of config.json."""
        return pretty(self.config)

    def index_bytes(self) -> bytes:
        """The bytes of model.safetensors.index.json, from which transformers and vLLM learn the names of the shards."""
        total = sum(t.size for t in self.tensors.values())
        weight_map = {name: t.file for name, t in self.tensors.items()}
        return pretty({"metadata": {"total_size": total}, "weight_map": weight_map})

    def to_bytes(self) -> bytes:
        """The bytes of manifest.json, the digest of all other bytes among them."""
        document = self._document()
        return lines({**document, "sha256": _self_digest(document)})

    def _document(self) -> dict[str, Any]:
        files = {**self.files, CONFIG: FileEntry.of(self.config_bytes()), INDEX: FileEntry.of(self.index_bytes())}
        return {
            "format": "pyquant",
            "version": _version_of(self.layers, self.tensors),
            "config": self.config,
            "extra": self.extra,
            "files": {name: {"bytes": f.size, "sha256": f.sha256} for name, f in files.items()},
            "layers": {name: _layer_to_json(entry) for name, entry in self.layers.items()},
            "pending": self.pending,
            "tensors": {
                name: {"dtype": DTYPE_NAMES[t.dtype], "file": t.file, "sha256": t.sha256, "shape": list(t.shape)}
                for name, t in self.tensors.items()
            },
        }


def parse(data: bytes) -> Manifest:
    """Reads a manifest from untrusted bytes; every rule of docs/file_format.md 4 that needs no tensor is checked.

    Raises CheckpointError naming the entry, what was found and what is allowed; nothing else.
    """
    document = loads(data, FILE)
    if document.get("format") != "pyquant":
        raise _refused("format", document.get("format"), "'pyquant'")
    _check_version(document.get("version"))
    _check_keys("the manifest", document, _KEYS)
    _check_digest(document, data)
    for key in ("config", "extra", "files", "layers", "pending", "tensors"):
        if not isinstance(document[key], dict):
            raise _refused(key, document[key], "an object")
    files = {name: _file(name, body) for name, body in document["files"].items()}
    layers = {name: _layer(name, body) for name, body in document["layers"].items()}
    tensors = {name: _tensor(name, body, files) for name, body in document["tensors"].items()}
    if document["version"] != _version_of(layers, tensors):
        allowed = f"{_version_of(layers, tensors)}, the first version that knows its kinds of layers and its names"
        raise _refused("version", document["version"], allowed)
    pending = {name: _superseded(name, value) for name, value in document["pending"].items()}
    shards = {name: entry for name, entry in files.items() if name not in (CONFIG, INDEX)}
    manifest = Manifest(document["config"], document["extra"], shards, tensors, layers, pending)
    _check_companions(manifest, files)
    _check_layers(manifest)
    _check_shards(manifest)
    return manifest


def _check_version(version: object) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise _refused("version", version, f"an integer from 1 to {VERSION}")
    if version > VERSION:
        newer = f"version {version} is of a newer pyquant"
        raise CheckpointError(f"{FILE}: {newer}; allowed: up to {VERSION}; install a newer pyquant")


def _version_of(layers: Mapping[str, LayerEntry], tensors: Mapping[str, object]) -> int:
    """The oldest version that can say it, so that older readers refuse nothing that they could read."""
    if not all(is_plain_name(name) for name in (*layers, *tensors)):
        return 3
    return 2 if any(layer.kind == "conv2d" for layer in layers.values()) else 1


def _check_digest(document: Mapping[str, Any], data: bytes) -> None:
    claimed = document["sha256"]
    _check_is_digest("sha256", claimed)
    if _self_digest({key: value for key, value in document.items() if key != "sha256"}) != claimed:
        raise CheckpointError(f"{FILE}: its contents do not have the SHA-256 it carries; it was damaged or altered")
    if lines(document) != data:
        raise CheckpointError(f"{FILE}: not written in the one allowed form; it was damaged or altered")


def _self_digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(lines(document)).hexdigest()


def _file(name: str, body: object) -> FileEntry:
    where = f"file {name[:80]!r}"
    if name not in (CONFIG, INDEX) and not SHARD.fullmatch(name):
        raise _refused("file name", name, f"{CONFIG}, {INDEX} or model-<16 hexadecimal digits>.safetensors")
    body = _check_keys(where, body, ("bytes", "sha256"))
    if not _is_size(body["bytes"]):
        raise _refused(f"{where}: bytes", body["bytes"], f"an integer in [0, {MAX_FILE_BYTES}]")
    _check_is_digest(f"{where}: sha256", body["sha256"])
    return FileEntry(body["bytes"], body["sha256"])


def _tensor(name: str, body: object, files: Mapping[str, FileEntry]) -> TensorEntry:
    where = f"tensor {name[:80]!r}"
    if not is_safe_name(name):
        raise _refused("tensor name", name, NAMES)
    body = _check_keys(where, body, ("dtype", "file", "sha256", "shape"))
    if not isinstance(body["dtype"], str) or body["dtype"] not in DTYPES:
        raise _refused(f"{where}: dtype", body["dtype"], " ".join(DTYPES))
    if not isinstance(body["file"], str) or body["file"] not in files or not SHARD.fullmatch(body["file"]):
        raise _refused(f"{where}: file", body["file"], "a shard that the manifest lists")
    _check_is_digest(f"{where}: sha256", body["sha256"])
    shape = body["shape"]
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(_is_size(extent) for extent in shape):
        raise _refused(f"{where}: shape", shape, f"at most {_MAX_RANK} integers in [0, {MAX_FILE_BYTES}]")
    entry = TensorEntry(body["file"], DTYPES[body["dtype"]], tuple(shape), body["sha256"])
    if entry.size > files[entry.file].size:
        allowed = f"at most the {files[entry.file].size} of {entry.file}"
        raise _refused(f"{where}: shape", f"{entry.size} bytes", allowed)
    return entry


def _layer(name: str, body: object) -> LayerEntry:
    where = f"layer {name[:80]!r}"
    is_convolution = isinstance(body, dict) and body.get("kind") == "conv2d"
    body = _check_keys(where, body, (*_LAYER_KEYS, "geometry") if is_convolution else _LAYER_KEYS)
    if body["bias"] is not None and (not isinstance(body["bias"], str) or body["bias"] not in DTYPES):
        raise _refused(f"{where}: bias", body["bias"], "null, 'F32', 'F16' or 'BF16'")
    try:
        entry = LayerEntry(
            name=name,
            scheme=QScheme.from_dict(body["scheme"]),
            in_features=body["in_features"],
            out_features=body["out_features"],
            bias=None if body["bias"] is None else DTYPES[body["bias"]],
            activation=body["activation"],
            clamp=_clamp(where, body["clamp"]),
            kind=body["kind"],
            geometry=_geometry(where, body["geometry"]) if is_convolution else None,
        )
        check_entry(entry)
    except ArgumentError as error:
        raise CheckpointError(f"{FILE}: {where}: {error}") from None
    return entry


def _geometry(where: str, value: object) -> dict[str, tuple[int, ...] | int]:
    keys = (*GEOMETRY, "groups") if isinstance(value, dict) and "groups" in value else tuple(GEOMETRY)
    body = _check_keys(f"{where}: geometry", value, keys)
    if not all(isinstance(body[key], list) for key in GEOMETRY):
        raise _refused(f"{where}: geometry", value, "lists of integers, and an integer for groups")
    return {key: tuple(numbers) if key in GEOMETRY else numbers for key, numbers in body.items()}


def _clamp(where: str, value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise _refused(f"{where}: clamp", value, "null or two numbers")
    low, high = (_INFINITIES.get(v, v) if isinstance(v, str) else v for v in value)
    if not isinstance(low, float) or not isinstance(high, float):
        raise _refused(f"{where}: clamp", value, "null or two numbers, 'inf' or '-inf'")
    return low, high


def _layer_to_json(entry: LayerEntry) -> dict[str, Any]:
    words = {infinity: word for word, infinity in _INFINITIES.items()}
    plain = {key: getattr(entry, key) for key in ("activation", "in_features", "kind", "out_features")}
    geometry = (
        {}
        if entry.geometry is None
        else {"geometry": {k: v if isinstance(v, int) else list(v) for k, v in entry.geometry.items()}}
    )
    return {
        **plain,
        **geometry,
        "bias": None if entry.bias is None else DTYPE_NAMES[entry.bias],
        "clamp": None if entry.clamp is None else [words.get(v, v) for v in entry.clamp],
        "scheme": entry.scheme.to_dict(),
    }


def _superseded(name: str, value: object) -> str | None:
    if name not in (CONFIG, INDEX):
        raise _refused("pending", name, f"{CONFIG} and {INDEX}")
    if value is not None and not is_digest(value):
        raise _refused(f"pending: {name}", value, "null or 64 hexadecimal digits")
    return value if isinstance(value, str) else None


def _check_companions(manifest: Manifest, files: Mapping[str, FileEntry]) -> None:
    for name, data in ((CONFIG, manifest.config_bytes()), (INDEX, manifest.index_bytes())):
        if files.get(name) != FileEntry.of(data):
            raise CheckpointError(f"{FILE}: file '{name}' is missing or is not what the manifest's own contents give")


def _check_layers(manifest: Manifest) -> None:
    for layer in manifest.layers.values():
        for name, (dtype, shape) in tensor_specs(layer).items():
            entry = manifest.tensors.get(name)
            if entry is None:
                raise CheckpointError(f"{FILE}: tensor '{name}' of layer '{layer.name}' is missing")
            if (entry.dtype, entry.shape) != (dtype, shape):
                got = f"{DTYPE_NAMES[entry.dtype]} {list(entry.shape)}"
                raise _refused(f"tensor '{name}'", got, f"{DTYPE_NAMES[dtype]} {list(shape)} by its layer's scheme")


def _check_shards(manifest: Manifest) -> None:
    sizes = dict.fromkeys(manifest.files, 0)
    for entry in manifest.tensors.values():
        sizes[entry.file] += entry.size
    for name, total in sizes.items():
        if total > manifest.files[name].size:
            raise _refused(f"file '{name}'", f"tensors of {total} bytes", f"at most its {manifest.files[name].size}")


def _check_keys(where: str, body: object, allowed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise _refused(where, body, "an object")
    wrong = [f"unknown key {key[:80]!r}" for key in body if key not in allowed]
    wrong += [f"key {key!r} is missing" for key in allowed if key not in body]
    if wrong:
        raise CheckpointError(f"{FILE}: {where}: {wrong[0]}; allowed: exactly {', '.join(allowed)}")
    return body


def _check_is_digest(what: str, value: object) -> None:
    if not is_digest(value):
        raise _refused(what, value, "64 hexadecimal digits")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_FILE_BYTES


def _refused(what: str, got: object, allowed: str) -> CheckpointError:
    return CheckpointError(f"{FILE}: {what}: got {repr(got)[:120]}; allowed: {allowed}")
