"""Calibration of a bank of experts: tokens of each are counted, and experts that saw none have ranges all the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_banks import Bank, one_by_one, register_banks, routing
from torch import Tensor, nn

import pyquant
from pyquant.nn import expert_rules


class Mixture(nn.Module):
    """A bank behind a router that never chooses its last two experts."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Bank(experts, 32, 48)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, *routing(x.shape[0], self.experts.num_experts, 2, seed=x.shape[0]))
        return y


@pytest.fixture(autouse=True)
def banks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rules, "_RULES", dict(expert_rules._RULES))
    register_banks()


def data() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(rows, 32) for rows in (20, 30, 40)]


def sqnr(got: Tensor, want: Tensor) -> float:
    return float(20 * torch.log10(want.norm() / (got - want).norm()))


def test_static_experts_are_right_and_those_without_tokens_are_told(tmp_path: Path) -> None:
    model, batches = Mixture(), data()
    with torch.no_grad():
        want = model(batches[0])
    with pytest.warns(pyquant.QuantizationWarning, match=r"2 of 6 experts of experts saw no token .*\(4, 5\)"):
        pyquant.quantize_(model, pyquant.W8A8(), data=batches)
    experts: Any = model.experts
    ids = torch.cat([routing(x.shape[0], 6, 2, seed=x.shape[0])[0] for x in batches])
    assert experts.tokens_seen == torch.bincount(ids.flatten(), minlength=6).tolist()
    for place in (0, 1):
        scales = [experts.expert(e)[place].input_scale.item() for e in range(6)]
        assert scales[4] == scales[5] == max(scales[:4])
    reasons = {r.name: r.reason for r in pyquant.quantization_report(model)}
    assert "no token" in reasons["experts.4.down_proj"]
    assert not reasons["experts.3.down_proj"]
    with torch.no_grad():
        got = model(batches[0])
        assert sqnr(got, want) > 25
        layers = [experts.expert(e) for e in range(6)]
        x, (ids, weights) = torch.randn(9, 32), routing(9, 4, 2)
        assert torch.equal(experts(x, ids + 2, weights), one_by_one(layers, nn.SiLU(), x, ids + 2, weights))
        pyquant.save_pretrained(model, tmp_path)
        again = pyquant.load_pretrained(tmp_path, Mixture)
        assert torch.equal(again(batches[0]), got)
    assert {r.name: r.reason for r in pyquant.quantization_report(again)} == reasons


def test_a_bank_that_saw_every_expert_says_nothing() -> None:
    model = Mixture(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.quantize_(model, pyquant.W4A8(group_size=16), data=data())
    assert model.experts.tokens_seen == [90, 90]


def test_a_bank_that_saw_nothing_is_an_error_and_nothing_changes() -> None:
    model = nn.ModuleDict({"unused": Mixture(), "used": nn.Linear(32, 32)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with pytest.raises(pyquant.CalibrationError, match=r"12 of 13 layers saw no data.*unused"):
        pyquant.quantize_(model, pyquant.W8A8(), data=data())
    assert type(model["unused"].experts) is Bank


def test_gptq_and_the_other_improvers_take_experts_as_layers() -> None:
    for experts in (2, 6):  # of six, two have no token
        model, batches = Mixture(experts), data()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", pyquant.QuantizationWarning)
            want = model(batches[0])
            pyquant.quantize_(model, pyquant.W4A8(group_size=16), data=batches, improve=["gptq", "bias_correction"])
            assert sqnr(model(batches[0]), want) > 12
