"""Linears that choose between experts stay in floating point: their last bits decide what a token computes."""

from __future__ import annotations

import pytest
from torch import nn

import pyquant
from pyquant import QLinear


class Top1Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 4)


class HunYuanMoEV1Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Linear(8, 4)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Gated(nn.Module):
    """A gate that chooses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.gate_proj = nn.Linear(8, 8), nn.Linear(8, 8)


def model() -> nn.ModuleDict:
    own = nn.ModuleDict({"router": nn.Linear(8, 4), "modality_router": nn.Linear(8, 4), "routers": nn.Linear(8, 8)})
    return nn.ModuleDict(
        {"own": own, "class": Top1Router(), "gate": HunYuanMoEV1Gate(), "mixture": Mixture(), "gated": Gated()}
    ).eval()


ROUTERS = {"own.router", "own.modality_router", "class.classifier", "gate.wg", "mixture.gate"}


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=8)"])
def test_routers_are_left_and_the_report_says_so(scheme: str) -> None:
    quantised = pyquant.quantize_(model(), scheme, check_speed=False)
    told = {one.name: one for one in pyquant.quantization_report(quantised)}
    assert {name for name, one in told.items() if one.scheme == "float"} == ROUTERS
    assert all(told[name].reason.startswith("a router, ") for name in ROUTERS)


def test_a_router_that_is_named_is_quantised() -> None:
    config = {"class.classifier": pyquant.W8A16(), "_default": pyquant.W8A8Dynamic()}
    quantised = pyquant.quantize_(model(), config, check_speed=False)
    assert isinstance(quantised["class"].classifier, QLinear)
    assert type(quantised["mixture"].gate) is nn.Linear
