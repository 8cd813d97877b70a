"""The ResNet-18 example runs from end to end, small, and its chain breaks where its skip list says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pyquant

FILE = Path(__file__).resolve().parents[2] / "examples" / "resnet18.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_resnet18", FILE)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["example_resnet18"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_the_example_runs_and_its_figures_hold(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    figures = example.main(["--width", "4", "--size", "16"])
    out = capsys.readouterr().out
    assert "layer4.0.conv1" in out
    assert figures["linked equals unlinked"] == 1
    assert (figures["linked"], figures["breaks"]) == (17, 2)
    assert 0 < figures["extra bytes after linking"] < 0.1 * figures["extra bytes before linking"]
    assert figures["SQNR dB"] > 15


def test_blocks_are_mapped_and_the_skip_list_is_kept(example: ModuleType, tmp_path: Path) -> None:
    floats = example.float_model(4, 16)
    state = {name: tensor.clone() for name, tensor in floats.state_dict().items()}
    model = example.quantise(floats, 16)
    assert all(torch.equal(tensor, state[name]) for name, tensor in floats.state_dict().items())
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert [name for name, kind in kinds.items() if kind in ("Conv2d", "Linear")] == list(example.SKIP)
    assert sum(kind == "QuantBasicBlock" for kind in kinds.values()) == 8
    assert sum(kind == "QResidual" for kind in kinds.values()) == 8
    assert not any("BatchNorm" in kind for kind in kinds.values())
    x = example.images(2, 16, 5)
    pyquant.save_pretrained(model, tmp_path)
    skeleton = pyquant.fold_batch_norm_(example.float_model(4, 16))
    for stage in (skeleton.layer1, skeleton.layer2, skeleton.layer3, skeleton.layer4):
        for i, block in enumerate(stage):
            stage[i] = example.QuantBasicBlock(block)
    again = pyquant.load_pretrained(tmp_path, skeleton)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_it_is_a_script_of_reasonable_size() -> None:
    assert len(FILE.read_text().splitlines()) < 150
