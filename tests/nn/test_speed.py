"""Layers that are slower in integers are told with figures; what is told follows from the clock alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import pyquant
from pyquant import W8A8Dynamic
from pyquant.nn import speed


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32))


def test_slow_layers_are_named_with_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"QLinear16": 4e-6, "Linear16": 2e-6, "QLinear32": 1e-6, "Linear32": 3e-6}
    monkeypatch.setattr(speed, "_seconds", lambda m, x: clock[f"{type(m).__name__}{m.in_features}"])
    with pytest.warns(pyquant.QuantizationWarning) as caught:
        quantised = pyquant.quantize_(model(), W8A8Dynamic(), check_speed=torch.randn(3, 16))
    assert caught[0].filename == __file__
    told = str(caught[0].message)
    assert "2 of 3 layers are slower" in told
    assert "all layers together: 0.78x" in told
    assert "0 [3, 16] 4 us against 2 us (0.50x); 4 [3, 16] 4 us against 2 us (0.50x)" in told
    records = pyquant.compare_speed(quantised, (torch.randn(3, 16),), seconds=0.01)
    assert [(r.name, round(r.ratio, 2)) for r in records] == [("0", 0.5), ("4", 0.5), ("2", 3.0)]
    clock["QLinear16"] = 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.quantize_(model(), W8A8Dynamic(), check_speed={"input": torch.randn(3, 16)})


def test_an_example_that_fails_leaves_the_model_and_no_hooks() -> None:
    whole = model()
    with pytest.raises(pyquant.ArgumentError, match="in_features"):
        pyquant.quantize_(whole, W8A8Dynamic(), check_speed=torch.randn(3, 17))
    assert type(whole[0]) is nn.Linear  # type: ignore[index]
    quantised = pyquant.quantize_(whole, W8A8Dynamic())
    with pytest.raises(pyquant.ArgumentError, match="in_features"):
        pyquant.compare_speed(quantised, torch.randn(3, 17))
    assert not any(m._forward_pre_hooks for m in quantised.modules())


def test_convolutions_and_wrong_arguments() -> None:
    conv = pyquant.quantize_(nn.Sequential(nn.Conv2d(3, 8, 3)), W8A8Dynamic())
    assert [r.shape for r in pyquant.compare_speed(conv, torch.randn(1, 3, 8, 8), seconds=0.01)] == [(1, 3, 8, 8)]
    for wrong in (0, -1, float("inf"), "2", True):
        with pytest.raises(pyquant.ArgumentError, match="seconds"):
            pyquant.compare_speed(conv, torch.randn(1, 3, 8, 8), seconds=wrong)  # type: ignore[arg-type]
    with pytest.raises(pyquant.ArgumentError, match="without quantised layers"):
        pyquant.compare_speed(model(), torch.randn(3, 16))
