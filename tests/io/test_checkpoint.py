"""Round trips, shards, what surrounds a checkpoint, readers beside writers, memory."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import accept
import checkpoints
import problems
import pytest
import torch

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import load_checkpoint, read_manifest, save_checkpoint

FIXTURE = Path(__file__).parent / "fixtures" / "version_1"
FIXTURE_PIN = "9fa5c8602a83c5873af233558040e2d04e088c26dfe9fe46828c3121f88b74a0"


@pytest.mark.parametrize(("n", "k"), [(1, 8), (2, 8), (9, 16), (33, 72), (0, 8), (5, 0), (0, 0)])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_every_scheme_comes_back_bit_by_bit(n: int, k: int, bias: torch.dtype | None, tmp_path: Path) -> None:
    tensor = None if bias is None else torch.linspace(-3, 3, n).to(bias)
    seed = problems.BASE_SEED + n
    layers = [
        checkpoints.layer(f"l.{i}", s, n, k, seed + i, bias=tensor) for i, s in enumerate(checkpoints.SCHEMES.values())
    ]
    pin = save_checkpoint(tmp_path, layers, {}, extra={})
    loaded = load_checkpoint(tmp_path, manifest_sha256=pin)
    accept.t0(checkpoints.fingerprint(loaded), checkpoints.contents(layers, {}, {}))
    assert all(t is None or t.is_contiguous() for one in loaded.layers for t in (one.codes, one.weight_zero_point))


@pytest.mark.parametrize("seed", range(4))
def test_whole_models_come_back_and_saving_again_gives_the_same_bytes(seed: int, tmp_path: Path) -> None:
    layers, tensors, extra = checkpoints.sample(seed)
    pin = save_checkpoint(tmp_path / "a", layers, tensors, extra=extra)
    loaded = load_checkpoint(tmp_path / "a")
    accept.t0(checkpoints.fingerprint(loaded), checkpoints.contents(layers, tensors, extra))
    accept.t0(loaded.manifest_sha256, pin)
    accept.t0(save_checkpoint(tmp_path / "b", loaded.layers, loaded.tensors, extra=loaded.extra), pin)
    files = [{p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in "ab"]
    accept.t0(files[0], files[1])


def test_every_type_of_other_tensors_comes_back(tmp_path: Path) -> None:
    bits = torch.arange(-4, 4, dtype=torch.int8).repeat(8)
    types = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    tensors = {f"t.{t}".replace("torch.", ""): bits.view(t) for t in [*types, torch.float32, torch.float64]}
    tensors |= {
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "no.rows": torch.zeros(0, 3),
        "one": torch.ones(()),
    }
    tensors |= {"flag": torch.tensor([True, False])}
    save_checkpoint(tmp_path, [], tensors, extra={})
    accept.t0(checkpoints.fingerprint(load_checkpoint(tmp_path)), checkpoints.contents([], tensors, {}))


def test_views_and_shared_and_strided_tensors_are_stored_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "all": base,
        "same": base,
        "rows": base[1:3],
        "columns": base[:, ::2],
        "t": base.T,
        "x": base[:1].expand(3, 6),
    }
    tensors["strange"] = torch.as_strided(base, (1, 1), (1, 8))
    tensors["grad"] = torch.nn.Parameter(base[0])
    save_checkpoint(tmp_path, [], tensors, extra={})
    accept.t0(checkpoints.fingerprint(load_checkpoint(tmp_path)), checkpoints.contents([], tensors, {}))


def test_strided_layers_are_stored_as_what_they_show(tmp_path: Path) -> None:
    scheme = checkpoints.SCHEMES["W4A16 affine g8"]
    layer = checkpoints.layer("fc", scheme, 6, 16, 3)
    twisted = {f: getattr(layer, f).T.clone().T for f in ("codes", "weight_scale", "weight_zero_point")}
    strided = checkpoints.layer("fc", scheme, 6, 16, 3, **twisted)
    save_checkpoint(tmp_path, [strided], {}, extra={})
    accept.t0(checkpoints.fingerprint(load_checkpoint(tmp_path)), checkpoints.contents([layer], {}, {}))


def test_the_model_itself_may_be_the_layer(tmp_path: Path) -> None:
    layer = checkpoints.layer("", checkpoints.SCHEMES["W8A8Dynamic"], 4, 8, 1)
    save_checkpoint(tmp_path, [layer], {}, extra={})
    accept.t0(checkpoints.fingerprint(load_checkpoint(tmp_path)), checkpoints.contents([layer], {}, {}))


@pytest.mark.parametrize("max_shard_bytes", [1, 100, 400, 10**9])
def test_shards_keep_layers_whole_and_add_up(max_shard_bytes: int, tmp_path: Path) -> None:
    layers, tensors, extra = checkpoints.sample(1)
    save_checkpoint(tmp_path, layers, tensors, extra=extra, max_shard_bytes=max_shard_bytes)
    accept.t0(checkpoints.fingerprint(load_checkpoint(tmp_path)), checkpoints.contents(layers, tensors, extra))
    manifest = read_manifest(tmp_path)
    for layer in layers:
        homes = {t.file for name, t in manifest.tensors.items() if name.startswith(f"{layer.name}.")}
        accept.t0(len(homes), 1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    accept.t0(index["weight_map"], {name: t.file for name, t in manifest.tensors.items()})
    accept.t0(index["metadata"]["total_size"], sum(t.size for t in manifest.tensors.values()))
    assert (len(manifest.files) > 1) == (max_shard_bytes < 10**9)


def test_overwriting_removes_what_is_no_longer_named_and_nothing_of_others(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "README.md", "model-weights.txt", ".pyquant-mine"):
        (tmp_path / name).write_text("mine")
    for seed in (0, 1, 2):
        layers, tensors, extra = checkpoints.sample(seed)
        save_checkpoint(tmp_path, layers, tensors, extra=extra, max_shard_bytes=300 if seed == 0 else 10**6)
    ours = {"manifest.json", "config.json", "model.safetensors.index.json", *read_manifest(tmp_path).files}
    others = {"tokenizer.json", "README.md", "model-weights.txt", ".pyquant-mine"}
    accept.t0({p.name for p in tmp_path.iterdir()}, ours | others)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json", "a.safetensors"])
def test_files_that_pyquant_did_not_write_are_not_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=f"'{name}' is not of pyquant"):
        save_checkpoint(tmp_path, [], {}, extra={})
    accept.t0([(p.name, p.read_bytes()) for p in tmp_path.iterdir()], [(name, b"mine")])


def test_a_checkpoint_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, [], {"w": torch.ones(1)}, extra={})
    (tmp_path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="will not replace"):
        save_checkpoint(tmp_path, [], {}, extra={})


def test_pins(tmp_path: Path) -> None:
    pin = save_checkpoint(tmp_path, [], {"w": torch.ones(1)}, extra={})
    load_checkpoint(tmp_path, manifest_sha256=pin)
    save_checkpoint(tmp_path, [], {"w": torch.zeros(1)}, extra={})
    with pytest.raises(CheckpointError, match="pinned"):
        load_checkpoint(tmp_path, manifest_sha256=pin)
    for wrong in ("", pin.upper(), pin[:-1], 5):
        with pytest.raises(ArgumentError, match="manifest_sha256"):
            load_checkpoint(tmp_path, manifest_sha256=wrong)  # type: ignore[arg-type]


def test_what_is_no_checkpoint_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for path in ("missing", "empty", "file"):
        with pytest.raises(CheckpointError, match=path):
            load_checkpoint(tmp_path / path)


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "model.safetensors.index.json", "model-"])
@pytest.mark.parametrize("what", ["missing", "folder", "pipe", "link to nothing"])
def test_files_that_are_no_files(name: str, what: str, tmp_path: Path) -> None:
    layers, tensors, extra = checkpoints.sample(0)
    save_checkpoint(tmp_path, layers, tensors, extra=extra)
    path = next(p for p in tmp_path.iterdir() if p.name.startswith(name))
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link to nothing":
        path.symlink_to("nothing")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)


def test_links_are_followed_when_reading(tmp_path: Path) -> None:
    """Download caches hold their files as links; the digests say whether the target is right."""
    layers, tensors, extra = checkpoints.sample(0)
    save_checkpoint(tmp_path / "blobs", layers, tensors, extra=extra)
    (tmp_path / "links").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    accept.t0(
        checkpoints.fingerprint(load_checkpoint(tmp_path / "links")), checkpoints.contents(layers, tensors, extra)
    )


def test_the_released_fixture_of_version_1_loads_for_ever() -> None:
    loaded = load_checkpoint(FIXTURE, manifest_sha256=FIXTURE_PIN)
    wanted = json.loads((FIXTURE.parent / "version_1_contents.json").read_bytes())
    accept.t0(checkpoints.spelled_out(loaded), wanted)
    assert {layer["kind"] for layer in wanted["layers"].values()} == {"linear", "embedding"}
    assert len({layer["scheme"] for layer in wanted["layers"].values()}) == len(checkpoints.SCHEMES)


def test_the_present_writer_still_writes_version_1_as_released(tmp_path: Path) -> None:
    """Another byte in any file means another version: raise manifest.VERSION, keep reading 1, add a fixture."""
    loaded = load_checkpoint(FIXTURE)
    config = {key: value for key, value in loaded.config.items() if key != "quantization_config"}
    save_checkpoint(tmp_path, loaded.layers, loaded.tensors, extra=loaded.extra, model_config=config)
    read = [{p.name: p.read_bytes() for p in d.iterdir()} for d in (tmp_path, FIXTURE)]
    accept.t0(read[0], read[1])


MEMORY = """
import sys, torch
sys.path[:0] = {paths!r}
from pyquant.io import load_checkpoint
load_checkpoint({warm!r})
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
loaded = load_checkpoint({path!r})
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from Linux /proc")
@pytest.mark.parametrize("name", ["W8A8Dynamic", "W4A8Dynamic g8"])
def test_loading_needs_at_most_twice_the_size_of_the_files(name: str, tmp_path: Path) -> None:
    layers = [checkpoints.layer(f"l{i}", checkpoints.SCHEMES[name], 1024, 4096, i) for i in range(12)]
    save_checkpoint(tmp_path / "big", layers, {}, extra={})
    save_checkpoint(tmp_path / "small", layers[:1], {}, extra={})
    size = sum(p.stat().st_size for p in (tmp_path / "big").iterdir())
    paths = [str(Path(__file__).parents[2])]
    code = MEMORY.format(paths=paths, warm=str(tmp_path / "small"), path=str(tmp_path / "big"))
    peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert size > 20e6
    assert peak <= 2.1 * size + 8e6, f"{peak / 1e6:.1f} MB for files of {size / 1e6:.1f} MB"


def test_saving_and_loading_leave_no_descriptor_and_no_memory_behind(tmp_path: Path) -> None:
    layers, tensors, extra = checkpoints.sample(0)

    def cycle() -> None:
        save_checkpoint(tmp_path, layers, tensors, extra=extra)
        load_checkpoint(tmp_path)
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / "missing")

    def tensors_alive() -> list[torch.Tensor]:
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    cycle()
    open_before = len(os.listdir("/proc/self/fd"))
    gc.collect()
    alive = tensors_alive()  # held, so that none of other tests dies, and lends its address, meanwhile
    known = set(map(id, alive))
    for _ in range(5):
        cycle()
    gc.collect()
    accept.t0(len(os.listdir("/proc/self/fd")), open_before)
    accept.t0([tuple(t.shape) for t in tensors_alive() if id(t) not in known], [])


def test_a_copied_directory_loads(tmp_path: Path) -> None:
    layers, tensors, extra = checkpoints.sample(0)
    save_checkpoint(tmp_path / "a", layers, tensors, extra=extra)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    accept.t0(checkpoints.fingerprint(load_checkpoint(tmp_path / "b")), checkpoints.contents(layers, tensors, extra))
