"""Saves and loads a checkpoint directory. A killed, failed or concurrent save never leaves a state that loads wrongly.

Order of a save (docs/file_format.md 5): shards under names that their contents give; the manifest, in one rename, which
is the moment the new checkpoint takes effect; config.json and the index, whose names cannot change, while the manifest
says what they replace; the manifest without that note; removal of shards that are no longer named.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from pyquant.core import arguments
from pyquant.core.paths import file_path
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import manifest as manifests
from pyquant.io.atomic import SaveDirectory, at_most, opened, read_file, reason_of
from pyquant.io.compressed_tensors import from_tensors, tensor_specs
from pyquant.io.manifest import CONFIG, INDEX, SHARD, FileEntry, Manifest, TensorEntry
from pyquant.io.prepare import Layers, by_name, check_json, check_layers, check_tensors, config_of, parts_of
from pyquant.io.record import LayerEntry, LayerRecord, check_layer
from pyquant.io.shards import check_digest, check_size, decode, encode
from pyquant.io.strict_json import MAX_BYTES

MAX_SHARD_BYTES: Final = 2**30
_ATTEMPTS: Final = 5


@dataclass(frozen=True)
class Checkpoint:
    """What load_checkpoint() gives.

    layers           the quantised layers, sorted by name.
    tensors          all other tensors, by name.
    config           contents of config.json.
    extra            what the caller stored with the tensors.
    manifest_sha256  SHA-256 of manifest.json; pins the whole checkpoint.
    """

    layers: tuple[LayerRecord, ...]
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    extra: Mapping[str, Any]
    manifest_sha256: str


def save_checkpoint(
    directory: str | os.PathLike[str],
    layers: Sequence[LayerRecord] | Layers,
    other_tensors: Mapping[str, torch.Tensor],
    *,
    extra: Mapping[str, Any],
    model_config: Mapping[str, Any] | None = None,
    head_prefix: str = "",
    refusal: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Writes a checkpoint, replacing one of ours that is there; other files in the directory are left alone.

    directory        made if it is missing. Weights or a config.json that pyquant did not write are refused.
    layers           quantised layers, names unique; or {name: function that gives the layer}, called twice, to check
                     and to write it, so that one layer and one file are in memory at a time.
    other_tensors    everything else by name: bool, int8..int64, uint8, float16/32/64, bfloat16.
    extra            JSON-able; 'recipe' in it is digested into config.json. Tuples come back as lists.
    model_config     keys of config.json other than quantization_config (a transformers configuration), or None.
    head_prefix      module that holds the body of a model with a head; other tools then find the layers of either.
    refusal          why other tools than pyquant must not read the layers, or '': config.json then stops them.
    max_shard_bytes  a file holds about this much at most; a layer is never split.
    ->               SHA-256 of manifest.json, for load_checkpoint(manifest_sha256=...).
    Raises ArgumentError for what cannot be saved, before anything is written; CheckpointError naming directory and
    reason when writing fails: the checkpoint that was there then still loads, or already the new one.
    """
    file_path("directory", directory)
    arguments.whole("max_shard_bytes", max_shard_bytes, 1)
    given = by_name(layers)
    entries = check_layers(given)
    check_tensors(other_tensors, entries)
    saved_extra = check_json("extra", extra)
    words = check_json("model_config", model_config or {}, whole_keys=True)
    config = config_of(list(entries.values()), other_tensors, saved_extra, words, head_prefix, refusal)
    draft = Manifest(config, saved_extra, {}, {}, entries)
    try:
        with SaveDirectory(directory) as out:
            return _save(out, draft, parts_of(given, entries, other_tensors, max_shard_bytes))
    except OSError as error:
        state = f"not saved: {reason_of(error)}; the checkpoint there, if any, is whole"
        raise CheckpointError(f"{os.fspath(directory)}: {state}") from error


def load_checkpoint(directory: str | os.PathLike[str], *, manifest_sha256: str | None = None) -> Checkpoint:
    """Reads a checkpoint after checking all of it: nothing is returned unless every byte is what the manifest says.

    manifest_sha256  the SHA-256 that manifest.json must have; None: any.
    Needs at most twice the size of the files as memory, above what earlier shards gave, and what the manifest's own
    limits allow (SECURITY.md).
    Raises CheckpointError naming file, tensor, what was found and what is allowed; ArgumentError for arguments that are
    no path or digest; nothing else.
    Source: docs/file_format.md.
    """
    path = file_path("directory", directory)
    if manifest_sha256 is not None and not manifests.is_digest(manifest_sha256):
        raise ArgumentError("manifest_sha256", repr(manifest_sha256)[:80], "64 hexadecimal digits or None")
    for _ in range(_ATTEMPTS):
        data = _read_manifest(path)
        _check_pin(path, data, manifest_sha256)
        try:
            return _load(path, data)
        except CheckpointError:
            # a save may have replaced the files between two reads; then, and only then, look again
            if _read_manifest(path) == data:
                raise
    raise CheckpointError(f"{path}: replaced {_ATTEMPTS} times while being loaded; allowed: a directory at rest")


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The checked manifest alone: layers, schemes, sizes and digests, without reading a tensor.

    Raises CheckpointError; ArgumentError for what is no path.
    """
    return manifests.parse(_read_manifest(file_path("directory", directory)))


def refuse_foreign(directory: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError where files of a directory, by their names, are weights that no save may replace."""
    there = set(names)
    foreign = {n for n in there if n.endswith(".safetensors") and not SHARD.fullmatch(n)}
    if manifests.FILE not in there:
        foreign |= there & {CONFIG, INDEX}
    if foreign:
        allowed = "a directory without weights and config.json of others, or a pyquant checkpoint"
        raise CheckpointError(f"{directory}: '{min(foreign)}' is not of pyquant; allowed: {allowed}")


def _save(out: SaveDirectory, draft: Manifest, parts: Iterator[dict[str, torch.Tensor]]) -> str:
    before = _superseded(out)
    manifest = _in_force(out)
    if manifest is None or not manifest.pending:
        # while a note is pending, config.json and the index may still name shards that the manifest does not
        _sweep(out, set() if manifest is None else set(manifest.files))
    keep = {name for name in out.names() if SHARD.fullmatch(name)}
    try:
        files: dict[str, FileEntry] = {}
        tensors: dict[str, TensorEntry] = {}
        for part in parts:
            name, data, files[name], entries = encode(part)
            out.publish(out.stage(data), name)
            tensors |= entries
        data = _commit(out, replace(draft, files=files, tensors=tensors), before)
    except BaseException:
        with suppress(OSError, CheckpointError):  # the first error is the one to report; the next save cleans up again
            manifest = _in_force(out)
            _sweep(out, keep | (set() if manifest is None else set(manifest.files)))
        raise
    _sweep(out, set(files))
    return hashlib.sha256(data).hexdigest()


def _sweep(out: SaveDirectory, keep: Set[str]) -> None:
    out.sweep(lambda name: SHARD.fullmatch(name) is not None and name not in keep)


def _commit(out: SaveDirectory, final: Manifest, before: Mapping[str, str | None]) -> bytes:
    data = final.to_bytes()
    companions = {INDEX: final.index_bytes(), CONFIG: final.config_bytes()}
    for name, content in ((manifests.FILE, data), *companions.items()):
        if len(content) > MAX_BYTES:
            raise ArgumentError("layers", f"{name} of {len(content)} bytes", f"at most {MAX_BYTES}: fewer tensors")
    # all space is taken before the first visible change: a full disk cannot stop what follows half way
    staged = {name: out.stage(content) for name, content in companions.items()}
    pending = out.stage(replace(final, pending=before).to_bytes())
    finished = out.stage(data)
    out.sync()
    out.publish(pending, manifests.FILE)
    out.sync()
    # other readers know no manifest: they find the old pair, no config.json, or the new pair, never one of each
    out.remove(CONFIG)
    out.sync()
    for temporary, name in ((staged[INDEX], INDEX), (staged[CONFIG], CONFIG), (finished, manifests.FILE)):
        out.publish(temporary, name)
        out.sync()
    return data


def _superseded(out: SaveDirectory) -> dict[str, str | None]:
    """SHA-256 of config.json and the index as they are, after refusing what pyquant did not write."""
    refuse_foreign(out.path, out.names())
    contents = {name: out.read(name, MAX_BYTES) for name in (CONFIG, INDEX)}
    return {name: None if data is None else hashlib.sha256(data).hexdigest() for name, data in contents.items()}


def _in_force(out: SaveDirectory) -> Manifest | None:
    data = out.read(manifests.FILE, MAX_BYTES)
    if data is None:
        return None
    try:
        return manifests.parse(data)
    except CheckpointError as error:
        raise CheckpointError(f"{out.path}: will not replace a checkpoint it cannot read: {error}") from None


def _read_manifest(path: Path) -> bytes:
    file = path / manifests.FILE
    try:
        return read_file(file, check=at_most(MAX_BYTES, file))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: not there; a directory without a manifest is no checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {reason_of(error)}") from None


def _check_pin(path: Path, data: bytes, pin: str | None) -> None:
    digest = hashlib.sha256(data).hexdigest()
    if pin is not None and digest != pin:
        raise CheckpointError(f"{path / manifests.FILE}: SHA-256 {digest}; allowed: the pinned {pin}")


def _load(path: Path, data: bytes) -> Checkpoint:
    manifest = manifests.parse(data)
    try:
        with opened(path) as dir_fd:
            _check_companions(path, dir_fd, manifest)
            layers, tensors = _read_shards(path, dir_fd, manifest)
    except OSError as error:
        where = path if error.filename in (str(path), path) else f"{path}: {error.filename}"
        raise CheckpointError(f"{where}: {reason_of(error)}") from None
    return Checkpoint(layers, tensors, manifest.config, manifest.extra, hashlib.sha256(data).hexdigest())


def _check_companions(path: Path, dir_fd: int, manifest: Manifest) -> None:
    for name, expected in ((CONFIG, manifest.config_bytes()), (INDEX, manifest.index_bytes())):
        where, file = f"{path}/{name}", FileEntry.of(expected)
        if name not in manifest.pending:
            content = read_file(name, dir_fd=dir_fd, check=lambda size, w=where, f=file: check_size(w, size, f))  # type: ignore[misc]
            check_digest(where, content, file)
            continue
        # an interrupted save: the file may be old, missing or new; the manifest is authoritative
        try:
            content = read_file(name, dir_fd=dir_fd, check=at_most(MAX_BYTES, where))
        except FileNotFoundError:
            continue
        if hashlib.sha256(content).hexdigest() not in (manifest.pending[name], file.sha256):
            raise CheckpointError(f"{where}: neither the file before the last save nor the one after it")


def _read_shards(
    path: Path, dir_fd: int, manifest: Manifest
) -> tuple[tuple[LayerRecord, ...], dict[str, torch.Tensor]]:
    waiting = dict(manifest.layers)
    layers: list[LayerRecord] = []
    tensors: dict[str, torch.Tensor] = {}
    for file, entry in manifest.files.items():
        entries = {name: t for name, t in manifest.tensors.items() if t.file == file}
        tensors |= decode(file, dir_fd, entry, entries, str(path))
        for name in [n for n, layer in waiting.items() if all(t in tensors for t in tensor_specs(layer))]:
            layers.append(_layer(path, waiting.pop(name), tensors))
    return tuple(sorted(layers, key=lambda one: one.name)), tensors


def _layer(path: Path, entry: LayerEntry, tensors: dict[str, torch.Tensor]) -> LayerRecord:
    try:
        layer = from_tensors(entry, tensors)
        check_layer(layer)
        return layer
    except (ArgumentError, CheckpointError) as error:
        raise CheckpointError(f"{path}: layer '{entry.name}': {error}") from None
