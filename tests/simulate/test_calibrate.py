"""calibrate_: ranges of simulating layers do not depend on one another."""

from __future__ import annotations

import copy

import torch
from torch import nn

from pyquant.core.presets import W4A4, W8A8, W8A8Dynamic
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.insert import insert_fake_quantize_


def test_ranges_do_not_depend_on_what_else_is_quantised() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    data = [torch.randn(16, 8)]
    found = [
        calibrate_(insert_fake_quantize_(copy.deepcopy(model), {"0": first, "2": W8A8()}), data, 1)[2].input_fake_quant
        for first in (W4A4(), W8A8Dynamic(), None)
    ]
    assert len({fake.scale.item() for fake in found}) == 1
    assert all(fake.mode == "quantize" for fake in found)
