"""Improvers of the float model from files: the bytes of the whole model's way, resumable, one block in memory."""

from __future__ import annotations

import os
import re
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
from float_files import Stop, built, contents, empty, killed_in_a_write, stopping_after, written
from safetensors.torch import save_file
from sample import sampled
from torch import Tensor, nn

import pyquant
from pyquant import ArgumentError, CheckpointError, Recipe, RotationSpec
from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.ptq.improve.steps import NAMES, parted
from pyquant.ptq.shards.before import STEPS

ROOT = Path(__file__).resolve().parents[3]


class Block(nn.Module):
    """Pre-norm, with a bias in the norm that only some of its readers can take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        nn.init.normal_(self.norm.weight, 1.0, 0.4)
        nn.init.normal_(self.norm.bias, 0.0, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.relu(self.up(y)) * self.gate(y).sigmoid())


class Net(nn.Module):
    """A stream that an inlet writes and a head reads; pairs in the blocks and behind them."""

    def __init__(self, depth: int = 2, width: int = 16) -> None:
        super().__init__()
        self.inlet, self.blocks = nn.Linear(6, width), nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Wrong(Net):
    """Whose registered spec leaves out a writer."""


class Plain(Net):
    """Without pairs outside of the blocks."""


class Bare(Block):
    """Of which no pair is registered."""


class Crossing(Net):
    """Whose registered pair lies in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bare(16) for _ in range(2))


READERS = {"blocks.*.norm": ["blocks.*.up", "blocks.*.gate"], "norm": ["head.0"]}
SPEC = RotationSpec(writers=["inlet", "blocks.*.down"], readers=READERS, online=["blocks.*.down"])
pyquant.register_rotation(Net, SPEC)
pyquant.register_rotation(Plain, SPEC)
pyquant.register_rotation(Wrong, RotationSpec(writers=["blocks.*.down"], readers=READERS))
pyquant.register_smoothing(Block, "norm", ["up", "gate"])
pyquant.register_smoothing(Block, "up", ["down"])
pyquant.register_smoothing(Net, "norm", ["head.0"])
pyquant.register_smoothing(Crossing, "blocks.0.up", ["blocks.1.down"])


def batches(count: int = 4) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5 + i % 2, 6, generator=g) * torch.tensor([1, 9, 1, 1, 0.2, 3]) for i in range(count)]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        yield


W4 = "W4A8(group_size=8)"
CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "equalize": (W4, ("equalize",)),
    "smooth": (W4, ("smooth",)),
    "search_scales": (W4, ("search_scales",)),
    "search_scales, no ranges": ("W4A4Dynamic(group_size=8)", ("search_scales",)),
    "search_scales, smoothed": ("W8A8", ("search_scales",)),
    "rotate": (W4, ("rotate",)),
    "rotate_online": ("W4A4Dynamic(group_size=8)", ("rotate_online", "gptq")),
    "all": (W4, ("equalize", "smooth", "rotate_online", "gptq", "bias_correction")),
    "recipe": (
        Recipe.from_dict(
            {"default": "W8A8", "improve": ["rotate", "smooth"], "calib_params": {"num_calib_batches": 4}}
        ),
        (),
    ),
}


def test_all_that_quantize_knows_are_known_in_its_order() -> None:
    assert tuple(STEPS) == parted(NAMES)[0]


@pytest.mark.parametrize("case", sampled(list(CASES), 3, "before", always=["all"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_equal_to_those_of_the_whole_model(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if dtype != torch.float32 and case not in ("all", "search_scales"):
        pytest.skip("a second type for what goes through most")
    (config, improve), data = CASES[case], [x.to(dtype) for x in batches()]

    def make() -> nn.Module:
        return Net().to(dtype)

    path = written(tmp_path / "float", built(make))
    told: list[str] = []
    on_disk = {"cache": tmp_path / "cache", "device": "cpu"} if case == "all" else {}
    model = empty(make)
    pyquant.quantize_files(
        model,
        path,
        tmp_path / "files",
        config,
        data=data,
        improve=improve,
        progress=lambda *step: told.append(step[2]),
        **on_disk,
    )
    whole = pyquant.quantize_(built(make), config, data=data, improve=improve, check_speed=False)
    pyquant.save_pretrained(whole, tmp_path / "whole", recipe=config if isinstance(config, Recipe) else None)
    assert contents(tmp_path / "files") == contents(tmp_path / "whole")
    assert not (tmp_path / "files.unfinished").exists()
    steps = {what.partition(" ")[0] for what in told}
    assert set(improve) | {"codes"} <= steps
    again = pyquant.load_pretrained(tmp_path / "files", lambda: _as_saved(make, improve))
    torch.testing.assert_close(again(data[0]), whole(data[0]))


def _as_saved(make: Callable[[], nn.Module], improve: tuple[str, ...]) -> nn.Module:
    model = built(make)
    if "rotate" in improve or "rotate_online" in improve:  # which gives a Linear behind a norm a bias
        pyquant.rotate_(model, batches()[0].to(model.inlet.weight.dtype), online="rotate_online" in improve)
    return model


HOW: dict[str, Any] = {"config": "W8A8", "improve": ("equalize", "search_scales", "rotate_online", "gptq")}


def run(folder: Path, out: str, **options: Any) -> Path:
    given: dict[str, Any] = {"data": batches(), **HOW, **options}
    pyquant.quantize_files(empty(Net), folder / "float", folder / out, given.pop("config"), **given)
    return folder / out


def test_it_goes_on_wherever_it_was_stopped(tmp_path: Path) -> None:
    written(tmp_path / "float", built(Net))
    want = contents(run(tmp_path, "whole"))
    stops = 0
    while True:
        stops += 1
        try:
            run(tmp_path, "files", progress=stopping_after(5 * stops))
            break
        except Stop:
            assert not (tmp_path / "files").exists()
    assert stops > 3
    assert contents(tmp_path / "files") == want
    assert not (tmp_path / "files.unfinished").exists()


@pytest.mark.parametrize("writes", sampled([4, 17, 26], 1, "writes"))
def test_after_a_kill_in_the_middle_of_a_write(writes: int, tmp_path: Path, threads: Callable[[int], None]) -> None:
    threads(1)  # as many as a fork has
    written(tmp_path / "float", built(Net))
    killed_in_a_write(run, tmp_path, writes)
    assert contents(run(tmp_path, "files")) == contents(run(tmp_path, "whole"))


def test_what_was_finished_is_not_read_again(monkeypatch, tmp_path: Path) -> None:
    written(tmp_path / "float", built(Net))
    reads: Counter[str] = Counter()
    ordinary = FloatWeights.read

    def read(self, key: str) -> Tensor:
        reads[f"{self._source.directory.name} {key}"] += 1
        return ordinary(self, key)

    monkeypatch.setattr(FloatWeights, "read", read)
    found = []
    for depth, count in ((2, 3), (4, 3), (4, 6)):
        reads.clear()
        path = written(tmp_path / f"{depth}", built(partial(Plain, depth)))
        options: dict[str, Any] = {"data": batches(count), "improve": ("smooth", "rotate", "gptq")}
        options["filter_fn"] = lambda _, name: name.startswith("blocks")
        pyquant.quantize_files(empty(partial(Plain, depth)), path, tmp_path / "out", W4, **options)
        found.append({key: n for key, n in reads.items() if key.endswith("up.weight")})
    # smooth: the output before, how blocks are called, the inputs of pairs. rotate: the output that smooth left, the
    # one before, the weight, and once more for the bias that is folded. Then the output, and five times as ever
    for depth, counts in zip((2, 4, 4), found, strict=True):
        assert {key.partition(" ")[0]: n for key, n in counts.items()} == {f"{depth}": 3, "smooth": 4, "rotate": 6}
        assert len(counts) == 3 * depth
    reads.clear()
    with pytest.raises(Stop):
        run(tmp_path, "stopped", progress=lambda _, __, what: _stop_at(what, "gptq"))
    before = Counter(reads)
    reads.clear()
    run(tmp_path, "stopped")
    assert sum(reads.values()) < sum(before.values()) / 2
    assert not [key for key in reads if key.startswith("float blocks.0.up")]


def _stop_at(what: str, step: str) -> None:
    if what.startswith(step):
        raise Stop


def test_other_data_and_damage_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "float", built(Net))
    how: dict[str, Any] = {"improve": ("smooth", "rotate")}
    with pytest.raises(Stop):
        run(tmp_path, "files", progress=lambda _, __, what: _stop_at(what, "ranges"), **how)
    with pytest.raises(CheckpointError, match="a journal with data"):
        run(tmp_path, "files", **{**how, "data": batches(5)})
    with pytest.raises(CheckpointError, match="a journal with floats"):
        run(tmp_path, "files", improve=("equalize", "smooth"))
    (file, *_) = (tmp_path / "files.unfinished" / "rotate").glob("block-*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        run(tmp_path, "files", **how)
    file.write_bytes(data)
    assert contents(run(tmp_path, "files", **how)) == contents(run(tmp_path, "whole", **how))


def test_what_cannot_be_done_is_told_and_the_model_is_as_before(tmp_path: Path) -> None:
    def refused(
        match: str, improve: str, make: Callable[[], nn.Module], error: Any = ArgumentError, **how: Any
    ) -> None:
        path = tmp_path / f"float {make.__name__}"
        if not path.exists():
            written(path, built(make))
        model = empty(make)
        before = {name: id(t) for name, t in (*model.named_modules(), *model.state_dict(keep_vars=True).items())}
        with pytest.raises(error, match=match):
            pyquant.quantize_files(
                model, path, tmp_path / make.__name__, "W8A8", improve=[improve], **{"data": batches(), **how}
            )
        after = {name: id(t) for name, t in (*model.named_modules(), *model.state_dict(keep_vars=True).items())}
        assert after == before
        assert not (tmp_path / make.__name__).exists()

    refused("spec.*moved by", "rotate", Wrong)
    refused("spec.*moved by", "rotate", Wrong)  # what was written is not taken for right by the next run
    refused("improve.*'blocks.0.up' and blocks.1.down in blocks.0 and blocks.1", "smooth", Crossing)
    refused("of which no rule knows", "rotate", Crossing)
    refused("nan|NaN", "smooth", Net, pyquant.errors.NonFiniteError, data=[x * float("nan") for x in batches()])
    refused("data.*None", "smooth", Net, data=None)


FEW, MANY, WIDTH = 3, 12, 256
MEMORY = f"""
import re, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT / "tests" / "support")!r}, {str(Path(__file__).parent)!r}]
import torch, pyquant
from test_before import Net
from torch import nn

def build(count):
    with torch.device("meta"):
        return Net(count, {WIDTH}).eval()

def peak(count):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    pyquant.quantize_files(build(count), folder / str(count), folder / "out", **how)
    return status("VmHWM") - before

pyquant.io.checkpoint.save_checkpoint.__kwdefaults__["max_shard_bytes"] = 2**20
how = dict(config="W8A8Dynamic", data=[torch.randn(16, 6) for _ in range(4)], improve=sys.argv[2:])
folder = Path(sys.argv[1])
status = lambda word: int(re.search(word + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
peak({FEW})  # what a first use loads
print(peak({FEW}), peak({MANY}))
"""


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is measured on Linux")
    model = built(partial(Net, MANY, WIDTH))
    state = model.state_dict()
    for count in (FEW, MANY):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        held = {key: t for key, t in state.items() if not re.match(rf"blocks\.(?!({_up_to(count)})\.)", key)}
        save_file(held, folder / "model.safetensors")
    # glibc would keep what was let go: what is in use is asked for
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEMORY, str(tmp_path), "equalize", "search_scales", "rotate_online"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stderr
    few, many = map(int, found.stdout.split())
    block = 6 * 4 * WIDTH**2
    assert many - few < (MANY - FEW) * block / 4, f"{few >> 10} and {many >> 10} KiB; a block has {block >> 10} KiB"


def _up_to(count: int) -> str:
    return "|".join(map(str, range(count)))
