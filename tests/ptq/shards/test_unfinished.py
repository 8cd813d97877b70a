"""OUT.unfinished, where finished blocks lie until the end: what is not ours there is not removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pyquant
from pyquant import ArgumentError

DATA = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def built() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    return nn.Sequential(blocks, nn.Linear(8, 2)).eval()


def empty() -> nn.Module:
    with torch.device("meta"):
        return built()


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    folder = tmp_path / "floats"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(built().state_dict(), folder / "model.safetensors")
    return folder


def test_a_folder_of_the_users_is_left_alone(floats: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out.unfinished" / "deeper" / "keep.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ArgumentError, match=r"argument 'out'.*keep\.txt"):
        pyquant.quantize_files(empty(), floats, tmp_path / "out", "W8A8", data=DATA)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_what_comes_there_meanwhile_is_kept(floats: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out.unfinished" / "keep.txt"

    def told(*_: object) -> None:
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")

    pyquant.quantize_files(empty(), floats, tmp_path / "out", "W8A8", data=DATA, improve=["gptq"], progress=told)
    assert [path.name for path in (tmp_path / "out.unfinished").glob("**/*")] == ["keep.txt"]


@pytest.mark.parametrize("improve", [[], ["gptq", "bias_correction"], ["learn_rounding"]])
def test_nothing_of_ours_is_left(improve: list[str], floats: Path, tmp_path: Path) -> None:
    pyquant.quantize_files(empty(), floats, tmp_path / "out", "W8A8", data=DATA, improve=improve)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["floats", "out"]


def test_the_current_folder(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    pyquant.quantize_files(empty(), floats, ".", "W8A8", data=DATA)
    assert (here / "manifest.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["floats", "here"]
