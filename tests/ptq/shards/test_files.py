"""quantize_files: the bytes of loading everything, quantize_ and save_pretrained, with one block in memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from block_nets import Between, Cross, Decoder, Skips, sequences
from float_files import Stop, built, contents, empty, killed_in_a_write, stopping_after, written
from safetensors.torch import save_file
from sample import sampled
from torch import Tensor, nn

import pyquant
from pyquant import ArgumentError, CheckpointError, Recipe
from pyquant.io.pretrained.float_weights import FloatWeights

ROOT = Path(__file__).resolve().parents[3]
DATA = sequences(3, rows=2)
IDS = list(torch.randint(24, (3, 2, 7), generator=torch.Generator().manual_seed(0)))


class Attending(nn.Module):
    """Layers inside of another class, a shared one, one that is skipped, and a buffer that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.router, self.down = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(32, 16, bias=False)
        self.again = self.up
        self.register_buffer("gain", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0] * self.router(x).sigmoid()
        return x + self.down(torch.relu(self.up(x)) * self.again(y)) * self.gain


class Tied(nn.Module):
    """Token ids in, a head that is tied to the embedding."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, 16)
        self.blocks = nn.Sequential(*(Attending() for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids))))


OBSERVED = {
    "default": "W8A8",
    "selective_quantizer_params": {"calibrator_w": "histogram", "calibrator_i": "histogram", "skip_modules": ["*norm"]},
    "calib_params": {"histogram_calib_method": "percentile", "percentile": 99.0, "num_calib_batches": 3},
    "layers": {"layers.1.up": {"scheme": "W4A8", "group_size": 8, "inputs": {"calibrator": "entropy"}}},
}
W4 = "W4A8Dynamic(group_size=8)"
CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "static": (partial(Decoder, 3), "W8A8", {"data": DATA}),
    "gptq": (partial(Decoder, 2), "W4A8(group_size=8)", {"data": DATA, "improve": ("gptq",)}),
    "all": (
        partial(Decoder, 2, ends=False),
        "W4A16(group_size=None)",
        {"data": sequences(3, rows=2, width=16), "improve": ("bias_correction", "learn_rounding", "gptq")},
    ),
    "skips": (partial(Skips, 3), W4, {"data": DATA, "improve": ("gptq",)}),
    "two lists": (partial(Cross, 2), "W8A8", {"data": DATA}),
    "tied": (Tied, {"*": pyquant.W8A8(), "*.router": None}, {"data": IDS, "num_batches": 2, "embeddings": True}),
    "head": (Tied, "W4A8(group_size=8)", {"data": IDS, "heads": True, "improve": ("gptq",)}),
    "no data": (Tied, W4, {"embeddings": True}),
    "recipe": (partial(Decoder, 2), Recipe.from_dict(OBSERVED), {"data": DATA}),
    "preset": (
        Tied,
        pyquant.recommended("encoder-w8a8", num_batches=3),
        {"data": IDS, "improve": ("bias_correction",)},
    ),
}


def whole_way(folder: Path, make: Callable[[], nn.Module], config: Any, seed: int = 0, **options: Any) -> None:
    """quantize_ and save_pretrained, of the model in memory."""
    model = pyquant.quantize_(built(make, seed), config, check_speed=False, **options)
    pyquant.save_pretrained(model, folder, recipe=config if isinstance(config, Recipe) else None)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        yield


@pytest.mark.parametrize("case", sampled(list(CASES), 3, "files", always=["all", "tied", "recipe"]))
def test_files_are_equal_to_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    make, config, options = CASES[case]
    path = written(tmp_path / "float", built(make))
    told: list[tuple[int, int, str]] = []
    model = empty(make)
    on_disk = {"cache": tmp_path / "cache", "device": "cpu"} if case in ("gptq", "two lists") else {}
    digest = pyquant.quantize_files(
        model, path, tmp_path / "files", config, progress=lambda *step: told.append(step), **options, **on_disk
    )
    whole_way(tmp_path / "whole", make, config, **options)
    assert contents(tmp_path / "files") == contents(tmp_path / "whole")
    assert digest == hashlib.sha256((tmp_path / "whole" / "manifest.json").read_bytes()).hexdigest()
    pyquant.load_pretrained(tmp_path / "files", partial(built, make))
    assert not (tmp_path / "files.unfinished").exists()
    assert all(done == i for steps in _by_step(told).values() for i, (done, _, _) in enumerate(steps, 1))
    assert all(steps[-1][0] == steps[-1][1] for steps in _by_step(told).values())
    assert any(p.is_meta for p in model.state_dict().values())


def _by_step(told: list[tuple[int, int, str]]) -> dict[str, list[tuple[int, int, str]]]:
    found: dict[str, list[tuple[int, int, str]]] = {}
    for step in told:
        found.setdefault(step[2].partition(" ")[0], []).append(step)
    return found


def test_a_model_that_was_built_and_other_names(tmp_path: Path) -> None:
    make = partial(Decoder, 2)
    path = written(tmp_path / "float", built(make))
    pyquant.quantize_files(
        built(make, seed=1),
        path,
        tmp_path / "files",
        "W8A8",
        data=DATA,
        filter_fn=lambda _, name: name != "head",
        save_to=tmp_path / "kept",
    )
    whole_way(tmp_path / "whole", make, "W8A8", data=DATA, filter_fn=lambda _, name: name != "head")
    assert contents(tmp_path / "files") == contents(tmp_path / "whole")
    assert (tmp_path / "kept" / "codes" / "blocks.journal").exists()


def test_weights_are_read_so_often_however_many_blocks_and_batches(monkeypatch, tmp_path: Path) -> None:
    reads: Counter[str] = Counter()
    ordinary = FloatWeights.read

    def read(self, key: str) -> Tensor:
        reads[key] += 1
        return ordinary(self, key)

    monkeypatch.setattr(FloatWeights, "read", read)
    found = []
    for depth, batches in ((2, 2), (5, 2), (5, 4)):
        reads.clear()
        make = partial(Decoder, depth, ends=False)
        path = written(tmp_path / f"{depth}", built(make))
        data = sequences(batches, rows=1, width=16)
        pyquant.quantize_files(empty(make), path, tmp_path / "out", "W4A8", data=data, improve=["gptq"])
        found.append({name: count for name, count in reads.items() if name.endswith("up.weight")})
    # twice to see how blocks are called, for ranges, for gptq, and for the codes
    assert [set(counts.values()) for counts in found] == [{5}, {5}, {5}]
    assert [len(counts) for counts in found] == [2, 5, 5]


HOW: dict[str, Any] = {"data": DATA, "improve": ["gptq"]}


def run(folder: Path, out: str, **options: Any) -> Path:
    make = partial(Decoder, 2)
    given: dict[str, Any] = {"config": "W4A8(group_size=8)", **HOW, **options}
    pyquant.quantize_files(empty(make), folder / "float", folder / out, given.pop("config"), **given)
    return folder / out


def test_it_goes_on_wherever_it_was_stopped(tmp_path: Path) -> None:
    written(tmp_path / "float", built(partial(Decoder, 2)))
    want = contents(run(tmp_path, "whole"))
    steps = 0
    while True:  # each run does one step more than the last one had left
        steps += 1
        told: list[Any] = []
        try:
            run(tmp_path, "files", progress=stopping_after(4 * steps))
            break
        except Stop:
            told.append(steps)
        assert not (tmp_path / "files").exists()
    assert steps > 2
    assert contents(tmp_path / "files") == want
    assert not (tmp_path / "files.unfinished").exists()


@pytest.mark.parametrize("writes", sampled([2, 9, 15, 21], 1, "writes"))
def test_after_a_kill_in_the_middle_of_a_write(writes: int, tmp_path: Path, threads: Callable[[int], None]) -> None:
    threads(1)  # as many as a fork has
    written(tmp_path / "float", built(partial(Decoder, 2)))
    killed_in_a_write(run, tmp_path, writes)
    assert contents(run(tmp_path, "files")) == contents(run(tmp_path, "whole"))


def test_a_folder_of_something_else_and_damage_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "float", built(partial(Decoder, 2)))
    with pytest.raises(Stop):
        run(tmp_path, "files", progress=stopping_after(9))
    for options in ({"data": sequences(3, rows=3)}, {"config": "W4A8(group_size=4)"}):
        with pytest.raises(CheckpointError, match="a journal with"):
            run(tmp_path, "files", **options)
    (codes,) = (tmp_path / "files.unfinished" / "codes").glob("*.safetensors")
    whole = codes.read_bytes()
    codes.write_bytes(whole[:-1] + b"?")
    with pytest.raises(CheckpointError, match="damaged"):
        run(tmp_path, "files")
    codes.write_bytes(whole)
    (found, *_) = (tmp_path / "files.unfinished" / "gptq").glob("*.safetensors")
    data = found.read_bytes()
    found.write_bytes(data[:-1] + b"?")
    with pytest.raises(CheckpointError, match="damaged"):
        run(tmp_path, "files")
    found.write_bytes(data)
    run(tmp_path, "files")
    written(tmp_path / "float", built(partial(Decoder, 2), seed=1))
    with pytest.raises(CheckpointError, match="a journal with"):
        run(tmp_path, "other", save_to=_stopped(tmp_path))


def _stopped(folder: Path) -> Path:
    written(folder / "float", built(partial(Decoder, 2)))
    with pytest.raises(Stop):
        run(folder, "stopped", save_to=folder / "kept", progress=stopping_after(2))
    written(folder / "float", built(partial(Decoder, 2), seed=1))
    return folder / "kept"


def test_what_cannot_be_done_is_told_and_the_model_is_as_before(tmp_path: Path) -> None:
    make = partial(Decoder, 2)
    path = written(tmp_path / "float", built(make))

    def refused(error: type[Exception], match: str, config: Any = "W8A8", make: Any = make, **options: Any) -> None:
        model = empty(make)
        before = {name: id(t) for name, t in (*model.named_modules(), *model.state_dict(keep_vars=True).items())}
        with pytest.raises(error, match=match):
            pyquant.quantize_files(model, options.pop("path", path), tmp_path / "out", config, **options)
        after = {name: id(t) for name, t in (*model.named_modules(), *model.state_dict(keep_vars=True).items())}
        assert after == before
        assert not (tmp_path / "out").exists()

    refused(ArgumentError, "None, for inlet.input")
    refused(ArgumentError, "no rule finds a pair", data=DATA, improve=["smooth"])
    refused(
        ArgumentError, "FP16.* for layers.0.up", {"layers.0.up": pyquant.FP16(), "_default": pyquant.W8A8()}, data=DATA
    )
    refused(ArgumentError, "chains", Recipe.from_dict({"default": "W8A8", "chains": "auto"}), data=DATA)
    refused(ArgumentError, "heads.*beside a recipe", Recipe.from_dict({}), data=DATA, heads=True)
    refused(ArgumentError, "blocks.*layers.9", data=DATA, blocks=["layers.9"])
    between = partial(Between, 2)
    refused(
        ArgumentError, "computed from what block", make=between, path=written(tmp_path / "b", built(between)), data=DATA
    )
    plain = partial(nn.Sequential, nn.Linear(6, 6))
    refused(ArgumentError, "blocks", make=lambda: plain(), path=written(tmp_path / "p", plain()), data=DATA)
    refused(CheckpointError, "no tensors", make=partial(Decoder, 3), data=DATA)
    refused(pyquant.errors.NonFiniteError, "nan.*inlet.input, batch 2", data=[*DATA[:2], DATA[2] * float("nan")])


FEW, MANY, WIDTH = 2, 9, 320
MEMORY = f"""
import re, sys
from pathlib import Path
import torch, pyquant
from torch import nn

def build(count):
    layer = lambda: nn.Linear({WIDTH}, {WIDTH}, bias=False)
    block = lambda: nn.Sequential(layer(), nn.ReLU(), layer())
    with torch.device("meta"):
        return nn.Sequential(nn.Sequential(*(block() for _ in range(count))), nn.Identity())

def peak(count):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    pyquant.quantize_files(build(count), folder / str(count), folder / "out", **how)
    return status("VmHWM") - before

pyquant.io.checkpoint.save_checkpoint.__kwdefaults__["max_shard_bytes"] = 2**20
how = dict(config="W4A8(group_size=None)", data=[torch.randn(16, {WIDTH}) for _ in range(2)], improve=["gptq"])
folder = Path(sys.argv[1])
status = lambda word: int(re.search(word + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
peak({FEW})  # what a first use loads
print(peak({FEW}), peak({MANY}))
"""


def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is measured on Linux")
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    for count in (FEW, MANY):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        tensors = {f"0.{i}.{j}.weight": weight.clone() for i in range(count) for j in (0, 2)}
        save_file(tensors, folder / "model.safetensors")
    # glibc would keep what was let go: what is in use is asked for
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stderr
    few, many = map(int, found.stdout.split())
    block = 2 * 4 * WIDTH**2
    assert many - few < (MANY - FEW) * block / 4, f"{few >> 10} and {many >> 10} KiB; a block has {block >> 10} KiB"
