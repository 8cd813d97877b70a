"""Damage: every flipped bit, every cut and every appended byte in any file of a checkpoint is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import accept
import checkpoints
import problems
import pytest

from pyquant.errors import CheckpointError
from pyquant.io import load_checkpoint, save_checkpoint

FLIPS, CUTS, APPENDS = [1000, pytest.param(4000, marks=pytest.mark.nightly)], 200, 200


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("tampered")
    layers, tensors, extra = checkpoints.sample(1)
    save_checkpoint(path, layers, tensors, extra=extra, max_shard_bytes=300)
    yield path
    # whatever was done in between was undone: the refusals came from the damage alone
    accept.t0(checkpoints.fingerprint(load_checkpoint(path)), checkpoints.contents(layers, tensors, extra))


def _accepted(directory: Path, file: Path, damaged: bytes) -> bool:
    good = file.read_bytes()
    assert damaged != good
    checkpoints.write_in_place(file, damaged)
    try:
        load_checkpoint(directory)
    except CheckpointError:
        return False
    finally:
        checkpoints.write_in_place(file, good)
    return True


def _files(directory: Path) -> list[Path]:
    files = sorted(directory.iterdir())
    names = {f.name for f in files}
    assert {"manifest.json", "config.json", "model.safetensors.index.json"} < names
    assert len(files) >= 5
    return files


@pytest.mark.parametrize("flips", FLIPS)
def test_every_flipped_bit_is_refused(flips: int, directory: Path) -> None:
    rng = random.Random(problems.BASE_SEED)
    files = _files(directory)
    loaded = []
    for index in range(flips):
        file = files[index % len(files)]
        data = bytearray(file.read_bytes())
        # one in five in the first bytes: length prefix and header of a shard
        position = rng.randrange(min(len(data), 64)) if index % 5 == 0 else rng.randrange(len(data))
        bit = rng.randrange(8)
        data[position] ^= 1 << bit
        if _accepted(directory, file, bytes(data)):
            loaded.append((file.name, position, bit))
    accept.t0(loaded, [])


def test_every_cut_is_refused(directory: Path) -> None:
    rng = random.Random(problems.BASE_SEED + 1)
    files = _files(directory)
    loaded = []
    for index in range(CUTS):
        file = files[index % len(files)]
        data = file.read_bytes()
        length = [0, 1, 8, len(data) - 1][index % 4] if index % 3 == 0 else rng.randrange(len(data))
        if _accepted(directory, file, data[:length]):
            loaded.append((file.name, length))
    accept.t0(loaded, [])


def test_everything_appended_is_refused(directory: Path) -> None:
    rng = random.Random(problems.BASE_SEED + 2)
    files = _files(directory)
    loaded = []
    for index in range(APPENDS):
        file = files[index % len(files)]
        more = [b"\0", b" ", b"\n", b"}", b"{}", b"\0" * 8, rng.randbytes(rng.randrange(1, 64))][index % 7]
        if _accepted(directory, file, file.read_bytes() + more):
            loaded.append((file.name, more))
    accept.t0(loaded, [])


def test_files_exchanged_with_those_of_another_checkpoint_are_refused(directory: Path, tmp_path: Path) -> None:
    layers, tensors, extra = checkpoints.sample(3)
    save_checkpoint(tmp_path, layers, tensors, extra=extra, max_shard_bytes=300)
    mine, theirs = _files(directory), {f.name: f for f in tmp_path.iterdir()}
    shards = [f for f in mine if f.name.startswith("model-")]
    other = [f for f in theirs.values() if f.name.startswith("model-")]
    pairs = [(f, theirs[f.name]) for f in mine if f.name in theirs]
    pairs += [(a, b) for a in shards for b in [*shards, *other]]
    damages = [(a, b.read_bytes()) for a, b in pairs if a.read_bytes() != b.read_bytes()]
    assert len(damages) > len(shards)
    loaded = [a.name for a, data in damages if _accepted(directory, a, data)]
    accept.t0(loaded, [])


def test_blocks_of_zeros_as_a_failing_disk_leaves_them_are_refused(directory: Path) -> None:
    loaded = []
    for file in _files(directory):
        data = file.read_bytes()
        for start in range(0, len(data), 512):
            damaged = data[:start] + b"\0" * min(512, len(data) - start) + data[start + 512 :]
            if damaged != data and _accepted(directory, file, damaged):
                loaded.append((file.name, start))
    accept.t0(loaded, [])
