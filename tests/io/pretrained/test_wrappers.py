"""Checkpoints of models in wrappers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pyquant


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda m: torch.compile(nn.DataParallel(m))])
def test_a_wrapped_model_is_saved_by_its_own_names(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model = pyquant.quantize_(build(), "W8A8Dynamic", check_speed=False)
    pyquant.save_pretrained(wrap(model), tmp_path / "q")
    x = torch.randn(4, 32)
    assert torch.equal(pyquant.load_pretrained(tmp_path / "q", build)(x), model(x))
