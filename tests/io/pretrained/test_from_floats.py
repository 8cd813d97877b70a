"""quantize_checkpoint_: the codes of loading everything and then quantize_, with one layer of floats at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import pyquant
from pyquant.errors import ArgumentError, CheckpointError, SchemeError


class Net(nn.Module):
    """Shared, tied and rewritten layers, what stays in floating point, and a buffer that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.recurrent = nn.LSTM(32, 32, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.again = self.up
        self.conv = nn.Conv1d(32, 32, 1)
        self.image = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(32, 24, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("count", torch.tensor([3]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.recurrent(x)[0]
        x = x + self.down(self.up(self.norm(x)).relu() + self.again(x)) + self.image(x[:, None])[:, :1].mean()
        return self.head(self.conv(x.mT).mT) * self.count


IDS = torch.arange(12).reshape(2, 6)


def build() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def empty() -> Net:
    with torch.device("meta"):
        return build()


def written(folder: Path, model: nn.Module, files: int = 3, **words: Any) -> Path:
    """The model as transformers writes it: an index, shards, tied tensors once."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(words))
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != "head.weight"}
    tensors = {name: t for name, t in tensors.items() if not name.startswith("again.")}
    homes = {name: f"model-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(homes.values()):
        save_file({name: t for name, t in tensors.items() if homes[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def same_files(one: nn.Module, other: nn.Module, folder: Path) -> bool:
    return pyquant.save_pretrained(one, folder / "one") == pyquant.save_pretrained(other, folder / "other")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("W8A8Dynamic", {}),
        ("W4A16(group_size=16)", {"embeddings": True, "heads": True}),
        ({"attention.q_proj": "W4A8Dynamic(group_size=16)", "recurrent": "W8A16", "re:up|again": None}, {}),
        ({nn.MultiheadAttention: None, "_default": "FP16"}, {"heads": True}),
        ("W4A16(group_size=24)", {"on_indivisible": "skip"}),
    ],
)
def test_files_are_equal_to_those_of_the_whole_model(config: Any, options: dict[str, Any], tmp_path: Path) -> None:
    config = (
        {k: v if v is None else pyquant.scheme_from_name(v) for k, v in config.items()}
        if isinstance(config, dict)
        else config
    )
    path = written(tmp_path / "float", build())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        whole = pyquant.quantize_(build(), config, check_speed=False, **options)
        told: list[tuple[int, int, str]] = []
        model = pyquant.quantize_checkpoint_(empty(), path, config, progress=lambda *a: told.append(a), **options)
    assert str(model) == str(whole)
    assert torch.equal(model(IDS), whole(IDS))
    assert same_files(model, whole, tmp_path)
    assert [done for done, _, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total, _ in told} == {len(told)}
    reasons = [[r.reason for r in pyquant.quantization_report(m)] for m in (model, whole)]
    assert reasons[0] == reasons[1]


def test_a_built_model_of_another_type_with_other_names(tmp_path: Path) -> None:
    path = written(tmp_path / "float", build(), files=1)
    whole = pyquant.quantize_(build().half(), "W8A8Dynamic", filter_fn=lambda _, name: name != "down")
    model = pyquant.quantize_checkpoint_(
        build().half(), path, "W8A8Dynamic", filter_fn=lambda _, name: name != "down", device="cpu"
    )
    assert same_files(model, whole, tmp_path)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 8))
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"old.weight": net[0].weight.detach(), "old.bias": net[0].bias.detach()}, folder / "model.safetensors")
    renamed = pyquant.quantize_checkpoint_(
        nn.Sequential(nn.Linear(8, 8)), folder, "W8A8Dynamic", rename=lambda name: name.replace("old", "0")
    )
    x = torch.randn(2, 8)
    assert torch.equal(renamed(x), pyquant.quantize_(net, "W8A8Dynamic")(x))
    with pytest.raises(ArgumentError, match="'rename'"):
        pyquant.quantize_checkpoint_(nn.Sequential(nn.Linear(8, 8)), folder, "W8A8Dynamic", rename=lambda _: "0.bias")


def test_what_is_wrong_is_told_and_the_model_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "float", build())
    model = empty()
    before = {name: id(t) for name, t in (*model.named_modules(), *model.state_dict(keep_vars=True).items())}

    def refused(error: type[Exception], match: str, config: Any = "W8A8Dynamic", **options: Any) -> None:
        with pytest.raises(error, match=match):
            pyquant.quantize_checkpoint_(model, options.pop("path", path), config, **options)
        after = {name: id(t) for name, t in (*model.named_modules(), *model.state_dict(keep_vars=True).items())}
        assert after == before

    refused(ArgumentError, "static input ranges for .*quantize_\\(model, config, data=batches\\)", "W8A8")
    refused(ArgumentError, "no_such", {"no_such": pyquant.W8A8Dynamic()})
    refused(SchemeError, "group_size", "W4A16(group_size=24)", on_indivisible="error")
    refused(ArgumentError, "'progress'", progress=3)
    refused(ArgumentError, "'device'", device="nowhere")
    coded = written(tmp_path / "coded", build(), quantization_config={"quant_method": "gptq"})
    refused(CheckpointError, "a model that gptq quantised; allowed: floating point", path=coded)
    other = build()
    other.up = other.again = nn.Linear(32, 40)
    refused(
        CheckpointError, r"'up.weight': float32 \[40, 32\]; allowed: \[48, 32\]", path=written(tmp_path / "o", other)
    )
    other = build()
    other.count = torch.tensor([3.0])
    refused(CheckpointError, "'count'.*whole numbers", path=written(tmp_path / "c", other))
    other = build()
    del other.down
    refused(CheckpointError, r"no tensors down.weight, which the model has", path=written(tmp_path / "d", other))
    other = build()
    other.down.weight.data[1, 2] = torch.nan
    refused(ArgumentError, r"'down: weight': got nan at \[1, 2\]", path=written(tmp_path / "n", other))
    file = path / "model-1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    refused(CheckpointError, "model-1.safetensors")
    file.write_bytes(whole)
    reads = iter(range(100))

    def failing(*_: Any) -> None:
        if next(reads) == 3:
            raise KeyboardInterrupt

    refused(KeyboardInterrupt, "^$", progress=failing)
    with pytest.warns(pyquant.QuantizationWarning, match="stay in floating point: conv"):
        pyquant.quantize_checkpoint_(model, path, "W8A8Dynamic")


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    other = build()
    other.extra = nn.Linear(4, 4)
    path = written(tmp_path / "float", other)
    with pytest.warns(
        pyquant.QuantizationWarning, match=r"Net has no place for the tensors extra\.(weight|bias), extra"
    ):
        pyquant.quantize_checkpoint_(empty(), path, {"*": pyquant.W8A8Dynamic(), "conv": None})


LAYERS, WIDTH = 48, 1024
SCRIPT = f"""
import re, sys
from pathlib import Path
import torch, pyquant

def build(count):
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(count)))

pyquant.quantize_checkpoint_(build(1), sys.argv[1] + "/one", "W8A8Dynamic")  # what a first use loads
status = lambda word: int(re.search(word + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
model = pyquant.quantize_checkpoint_(build({LAYERS}), sys.argv[1] + "/all", "W8A8Dynamic")
print(status("VmHWM") - before, sum(t.nbytes for t in model.state_dict().values()))
"""


def test_floats_of_one_layer_are_in_memory_at_a_time(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is measured on Linux")
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    for folder, count in (("one", 1), ("all", LAYERS)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        save_file({f"{i}.weight": weight.clone() for i in range(count)}, tmp_path / folder / "model.safetensors")
    # glibc would keep the floats of such small layers for later ones: what is in use is asked for
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stderr
    peak, quantised = map(int, found.stdout.split())
    one = 4 * WIDTH * WIDTH
    assert quantised < LAYERS * one / 3.9
    assert peak < quantised + 6 * one, f"{peak >> 20} MiB for {quantised >> 20} MiB of codes"
    assert peak < LAYERS * one / 2
