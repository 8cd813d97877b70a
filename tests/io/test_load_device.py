"""load_pretrained(device=...): the whole model moves at the end, or nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pyquant


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_a_meta_model_comes_to_the_device(device: torch.device | str | None, tmp_path: Path) -> None:
    model = pyquant.quantize_(build(), "W8A8Dynamic")
    pyquant.save_pretrained(model, tmp_path)
    with torch.device("meta"):
        skeleton = build()
    again = pyquant.load_pretrained(tmp_path, skeleton, device=device)
    x = torch.randn(3, 8)
    assert torch.equal(again(x), model(x))
    single = pyquant.QLinear.from_float(nn.Linear(8, 4), pyquant.W8A8Dynamic())
    pyquant.save_pretrained(single, tmp_path / "single")
    assert torch.equal(pyquant.load_pretrained(tmp_path / "single", nn.Linear(8, 4), device=device)(x), single(x))


def test_the_whole_model_moves(tmp_path: Path) -> None:
    pyquant.save_pretrained(pyquant.quantize_(build(), "W8A8Dynamic"), tmp_path)
    moved = pyquant.load_pretrained(tmp_path, build, device="meta")
    assert all(t.is_meta for t in moved.state_dict().values())


@pytest.mark.parametrize("device", ["nowhere", 1.5, "cuda:99"])
def test_a_device_that_is_not_there_is_named_before_anything_changes(device: object, tmp_path: Path) -> None:
    pyquant.save_pretrained(pyquant.quantize_(build(), "W8A8Dynamic"), tmp_path)
    skeleton = build()
    with pytest.raises(pyquant.ArgumentError, match="argument 'device'"):
        pyquant.load_pretrained(tmp_path, skeleton, device=device)  # type: ignore[arg-type]
    assert isinstance(skeleton[0], nn.Linear)  # type: ignore[index]
