"""Directories that nobody should trust: every damage is a CheckpointError that names the file, and no model changes."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accept
import foreign
import problems
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pyquant
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.compressed_tensors import pack_to_int32
from pyquant.io.foreign.source import Source
from pyquant.io.foreign.tensors import TensorFile

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, "dynamic": False}
CONFIG = foreign.group_config("pack-quantized", WEIGHTS)


def tensors() -> dict[str, torch.Tensor]:
    g, found = torch.Generator().manual_seed(1), foreign.floats()
    for name, (n, k) in foreign.LAYERS.items():
        found |= foreign.of_layer(
            name,
            {
                "weight_packed": pack_to_int32(foreign.codes(4, (n, k), g), 4),
                "weight_shape": torch.tensor([n, k]),
                "weight_scale": torch.rand((n, k // 16), generator=g) + 0.1,
            },
        )
    return found


def good(folder: Path, shards: int = 1) -> Path:
    return foreign.write(folder / "m", CONFIG, tensors(), shards=shards)


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def put_header(file: Path, words: object, body: bytes) -> None:
    text = words if isinstance(words, bytes) else json.dumps(words).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_the_reader_gives_what_safetensors_gives(tmp_path: Path) -> None:
    file = good(tmp_path) / "model.safetensors"
    ours, theirs = TensorFile(file), load_file(file)
    assert set(ours.spans) == set(theirs)
    for name, tensor in theirs.items():
        found = ours.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    accept.t0(ours.metadata, {"format": "pt"})


def test_shards_and_one_file_give_the_same_model(tmp_path: Path) -> None:
    x = torch.randn(3, 64)
    one = pyquant.load_quantized_(foreign.Net(), good(tmp_path / "", 1))
    other = tmp_path / "shards"
    other.mkdir()
    accept.t1(pyquant.load_quantized_(foreign.Net(), good(other, 4))(x), one(x))


def test_layers_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's tensors are asked for when its turn comes, and never again."""
    asked: list[str] = []
    read = Source.read
    monkeypatch.setattr(Source, "read", lambda self, name, *a, **k: (asked.append(name), read(self, name, *a, **k))[1])
    pyquant.load_quantized_(foreign.Net(), good(tmp_path, 3))
    layers = [name.rpartition(".")[0] for name in asked if name.rpartition(".")[0] in foreign.LAYERS]
    assert layers == sorted(layers)
    assert len(asked) == len(set(asked))


def _index(words: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": words(json.loads(path.read_text())["weight_map"])}))

    return damage


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        words, body = header_of(file)
        put_header(file, change(words) or words, body)

    return damage


def _config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


def _fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _append(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def _cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])


def _long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def first(words: dict[str, Any]) -> Any:
    return next(body for name, body in words.items() if name != "__metadata__")


ONE_FILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config is a list": (_config("[]"), "config.json: a list"),
    "config is cut": (_config('{"a": '), "not the JSON it should be"),
    "a key twice": (_config('{"a": 1, "a": 2}'), "not the JSON it should be"),
    "NaN": (_config('{"a": NaN}'), "not the JSON it should be"),
    "deep": (_config('{"a": ' * 50 + "1" + "}" * 50), "nested too deeply"),
    "float model": (_config("{}"), "no quantization_config"),
    "method is text": (_config('{"quantization_config": "gptq"}'), "quantization_config is a str"),
    "another method": (_config('{"quantization_config": {"quant_method": "fp8"}}'), "quant_method 'fp8'"),
    "no method": (_config('{"quantization_config": {}}'), "quant_method 'None'"),
    "a pickle": (_pickle, "pytorch_model.bin is a pickle"),
    "a pipe": (_fifo, "not a regular file"),
    "appended": (_append, r"tensors of \d+ bytes"),
    "cut": (_cut, r"tensors of \d+ bytes"),
    "a header beyond the file": (_long_header, "a header of"),
    "an empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b"") and None, "a header of -1 bytes"),
    "a header of another kind": (_header(lambda words: b"[1]"), "a list; allowed: an object"),
    "a header that is no text": (_header(lambda words: b"\xff\xff"), "not UTF-8"),
    "metadata of numbers": (_header(lambda words: {**words, "__metadata__": {"a": 1}}), "not an object of texts"),
    "a path as a name": (_header(lambda words: {**words, "../../x": first(words)}), "allowed: 1 to 256 printable"),
    "an unknown type": (_header(lambda words: first(words).update(dtype="F8_E4M3")), "type 'F8_E4M3'"),
    "a negative size": (_header(lambda words: first(words).update(shape=[-1])), "allowed: sizes"),
    "a size that is true": (_header(lambda words: first(words).update(shape=[True])), "allowed: sizes"),
    "a huge size": (_header(lambda words: first(words).update(shape=[2**62, 2**62])), "as type and shape say"),
    "offsets beyond": (_header(lambda words: first(words).update(data_offsets=[0, 2**60])), "as type and shape say"),
    "bytes used twice": (
        _header(lambda words: words.update(twice=first(words))),
        "without gaps",
    ),
    "a key more": (_header(lambda words: first(words).update(more=1)), "not an object of dtype"),
    "a tensor less": (
        _header(lambda words: words.pop("body.fc1.weight_shape") and None),
        "without gaps|bytes; allowed",
    ),
}
SHARDED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file in another folder": (_index(lambda m: {k: f"../{v}" for k, v in m.items()}), "a name without a folder"),
    "an absolute file": (_index(lambda m: dict.fromkeys(m, "/etc/passwd")), "a name without a folder"),
    "a number as a file": (_index(lambda m: dict.fromkeys(m, 3)), "a name without a folder"),
    "no map": (_index(lambda m: []), "no weight_map"),
    "a missing file": (_index(lambda m: dict.fromkeys(m, "other.safetensors")), "No such file"),
    "a tensor not listed": (_index(lambda m: dict(list(m.items())[1:])), "is not in the index"),
    "a tensor not there": (_index(lambda m: {**m, "more": next(iter(m.values()))}), "is in the index and not there"),
}


@pytest.mark.parametrize("name", ONE_FILE)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    damage, told = ONE_FILE[name]
    folder = good(tmp_path)
    damage(folder)
    refused(folder, told)


@pytest.mark.parametrize("name", SHARDED)
def test_damage_of_an_index_is_refused(name: str, tmp_path: Path) -> None:
    damage, told = SHARDED[name]
    folder = good(tmp_path, 3)
    damage(folder)
    refused(folder, told)


def refused(folder: Path, told: str) -> None:
    net = foreign.Net()
    with pytest.raises(CheckpointError, match=told):
        pyquant.load_quantized_(net, folder)
    assert type(net.body["fc1"]) is nn.Linear


TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "a scale that is NaN": ({"weight_scale": torch.full((48, 4), torch.nan)}, "NaN or infinity"),
    "scales of integers": ({"weight_scale": torch.ones(48, 4, dtype=torch.int32)}, "allowed: float32 or float16"),
    "scales of another shape": ({"weight_scale": torch.ones(47, 4)}, r"allowed: \[48, 4\]"),
    "a shape beyond the codes": ({"weight_shape": torch.tensor([48, 2**40])}, "weight_shape"),
    "a negative shape": ({"weight_shape": torch.tensor([48, -64])}, "weight_shape"),
    "fewer columns than words": ({"weight_shape": torch.tensor([48, 8])}, "weight_shape"),
    "codes of one dimension": ({"weight_packed": torch.ones(48, dtype=torch.int32)}, "int32 \\[48\\]; allowed"),
    "codes of floats": ({"weight_packed": torch.ones(48, 8)}, "allowed: int32"),
    "groups beyond the scales": ({"weight_g_idx": torch.full((64,), 9, dtype=torch.int32)}, "groups from 9 to 9"),
    "negative groups": ({"weight_g_idx": torch.full((64,), -2, dtype=torch.int32)}, "groups from -2"),
    "groups of many sizes": ({"weight_g_idx": torch.zeros(64, dtype=torch.int32)}, "groups of one size"),
    "too few groups": ({"weight_g_idx": torch.arange(4, dtype=torch.int32)}, "g_idx"),
    "an unknown tensor": ({"weight_global_scale": torch.ones(1)}, "tensor 'weight_global_scale'"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    changes, told = TENSORS[name]
    folder = foreign.write(tmp_path / "m", CONFIG, {**tensors(), **foreign.of_layer("body.fc1", changes)})
    refused(folder, told)


@pytest.mark.parametrize(
    "changes", [{"more.weight": torch.ones(2)}, {"norm.weight": None}, {"norm.weight": torch.ones(2)}]
)
def test_other_tensors_must_be_those_of_the_model(changes: dict[str, Any], tmp_path: Path) -> None:
    found = {name: t for name, t in {**tensors(), **changes}.items() if t is not None}
    refused(foreign.write(tmp_path / "m", CONFIG, found), "more.weight|norm.weight")


def test_codes_are_no_float_weights(tmp_path: Path) -> None:
    """An int8 head beside no scale would load as weights of up to 127."""
    found = {**tensors(), "head.weight": torch.ones(10, 64, dtype=torch.int8)}
    refused(foreign.write(tmp_path / "m", CONFIG, found), "head.weight.*codes in the file")


def test_random_damage_never_gives_another_error(tmp_path: Path) -> None:
    folder, rng = good(tmp_path), random.Random(problems.BASE_SEED)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    refusals = 0
    for _ in range(150):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(8 + size)] = rng.randrange(256)
        file.write_bytes(bytes(bad[: rng.randrange(len(bad))] if rng.random() < 0.1 else bad))
        try:
            pyquant.load_quantized_(foreign.Net(), folder)
        except CheckpointError:
            refusals += 1
    assert refusals > 100


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    file = good(tmp_path) / "model.safetensors"
    opened = TensorFile(file)
    file.write_bytes(file.read_bytes() + b"0")
    with pytest.raises(CheckpointError, match="changed while being read"):
        opened.read("norm.weight")


def test_our_own_checkpoints_have_their_own_reader(tmp_path: Path) -> None:
    pyquant.save_pretrained(pyquant.quantize_(nn.Sequential(nn.Linear(8, 4)), pyquant.W8A8Dynamic()), tmp_path)
    with pytest.raises(CheckpointError, match="a checkpoint of pyquant; load_pretrained reads it"):
        pyquant.load_quantized_(nn.Sequential(nn.Linear(8, 4)), tmp_path)


def test_paths_that_are_none(tmp_path: Path) -> None:
    for path in (None, 3, ""):
        with pytest.raises(ArgumentError, match="path"):
            pyquant.load_quantized_(nn.Sequential(), path)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="No such file"):
        pyquant.load_quantized_(nn.Sequential(), tmp_path / "none")


@pytest.mark.parametrize("beside", ["an adapter", "another format", "an index of a save before"])
def test_model_safetensors_is_the_model_whatever_lies_beside(beside: str, tmp_path: Path) -> None:
    """As transformers looks for it; its save_pretrained leaves the index of a save in shards."""
    path = good(tmp_path)
    want = pyquant.load_quantized_(foreign.Net(), path).state_dict()
    if beside == "an index of a save before":
        weight_map = dict.fromkeys(tensors(), "model-00001-of-00002.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        name = {"an adapter": "adapter_model.safetensors", "another format": "consolidated.safetensors"}[beside]
        (path / name).write_bytes((path / "model.safetensors").read_bytes()[:40])
    got = pyquant.load_quantized_(foreign.Net(), path).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_files_that_another_reader_has_found(tmp_path: Path) -> None:
    path = good(tmp_path)
    (path / "model.safetensors").rename(path / "model.fp16.safetensors")
    (path / "model.safetensors").write_bytes(b"another model")
    source = Source(path, files=["model.fp16.safetensors"])
    assert set(source) == set(tensors())
    with pytest.raises(CheckpointError, match="no safetensors file"):
        Source(path, files=["pytorch_model.bin"])
