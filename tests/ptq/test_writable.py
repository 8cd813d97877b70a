"""Improvers of float models say by name why they cannot change a model that was made in torch.inference_mode()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.errors import ArgumentError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


DATA = [torch.linspace(-1, 1, 32).view(4, 8)] * 4
SCHEME = pyquant.W4A8Dynamic(None)
PAIRS = [("norm", ["fc1"])]
SPEC = pyquant.RotationSpec(online=["fc2"])
IMPROVERS: dict[str, Callable[[nn.Module], Any]] = {
    "equalize": lambda model: pyquant.equalize_(model),
    "smooth": lambda model: pyquant.smooth_(model, DATA, 4, pairs=PAIRS),
    "search_scales": lambda model: pyquant.search_scales_(model, SCHEME, DATA, 4, pairs=PAIRS),
    "rotate": lambda model: pyquant.rotate_(model, DATA[0], SPEC),
    "by quantize_": lambda model: pyquant.quantize_(model, SCHEME, data=DATA, improve=["equalize"], check_speed=False),
}


@pytest.mark.parametrize("improve", IMPROVERS.values(), ids=IMPROVERS)
def test_a_model_of_inference_mode_is_refused_before_anything_is_done(improve: Callable[[nn.Module], Any]) -> None:
    with torch.inference_mode():
        model = Block().eval()
    with pytest.raises(
        ArgumentError, match=r"torch.inference_mode\(\) \(norm.weight\); allowed: copy.deepcopy\(model\)"
    ):
        improve(model)
    improve(copy.deepcopy(model))  # what the message says
