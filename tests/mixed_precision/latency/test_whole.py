"""Whole configurations: planted costs are found, rounds are interleaved, the model is restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.latency.measure import measure_configurations
from pyquant.mixed_precision.latency.samples import Effort


class Ticking:
    """A clock that only the layers below advance, by what they are said to cost."""

    name = "planted"

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


def _switchable(clock: Ticking, cost_us: dict[int, float]) -> SwitchableModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    switchable = SwitchableModel(model, ("fp32", "W8A8Dynamic", "W4A8Dynamic(group_size=8)"))
    for group in switchable.groups:
        costs = {switchable.layer(group.layers[0], f): us for f, us in cost_us.items()}

        def tick(module: nn.Module, inputs: object, output: object, costs: dict[nn.Module, float] = costs) -> None:
            clock.ns += int(costs[module] * 1000)

        if costs:  # a layer and its twins share their hooks
            switchable.layer(group.layers[0], 0).register_forward_hook(tick)
    return switchable


def test_planted_costs_come_back() -> None:
    clock = Ticking()
    switchable = _switchable(clock, {0: 8.0, 1: 5.0, 2: 3.0})
    before = list(switchable.model)
    found = measure_configurations(
        switchable, [(0, 0), (1, 2), (2, 2), (0, 0)], torch.randn(3, 8), clock=clock, effort=Effort(5, 3)
    )
    assert found == {(0, 0): (16.0, 16.0, 16.0), (1, 2): (8.0, 8.0, 8.0), (2, 2): (6.0, 6.0, 6.0)}
    assert all(a is b for a, b in zip(before, switchable.model, strict=True))


def test_nothing_and_wrong_configurations_are_refused() -> None:
    switchable = _switchable(Ticking(), {})
    with pytest.raises(ArgumentError, match="configs"):
        measure_configurations(switchable, [], torch.randn(3, 8), effort=Effort())
    with pytest.raises(ArgumentError, match="config"):
        measure_configurations(switchable, [(0, 9)], torch.randn(3, 8), effort=Effort())
