"""Losses of configurations equal those computed by hand from outputs; passes are counted, the model is left alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs, TaskMetric
from pyquant.mixed_precision.loss.metrics import Accumulator

FORMATS = ("fp32", "int8", "int4")


def _switchable() -> SwitchableModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 5)).eval()
    torch.manual_seed(1)
    return SwitchableModel(model, FORMATS, [torch.randn(6, 24) for _ in range(3)], num_batches=3)


@pytest.mark.parametrize("name", ["kl", "sqnr", "mse", "cosine"])
def test_every_configuration_has_the_loss_of_its_outputs(name: str) -> None:
    switchable = _switchable()
    held_out = [torch.randn(5, 24), torch.randn(2, 24)]
    for batches in (None, held_out):
        loss = LossOfOutputs(switchable, name, batches)
        floats = torch.cat(switchable.outputs((0, 0, 0), batches))
        configs = list(itertools.product(range(3), repeat=3))
        for config in configs:
            found = loss(config)
            expected = Accumulator(name)
            expected.add(floats, torch.cat(switchable.outputs(config, batches)))
            assert found == (0 if not any(config) else pytest.approx(expected.value(), rel=1e-12))
            assert found == loss(config)
        assert loss.forward_passes == len(loss.batches) * (1 + 2 * (len(configs) - 1))


def test_the_task_metric_is_a_drop_and_sees_the_configuration() -> None:
    switchable = _switchable()
    x = torch.randn(300, 24)
    with torch.no_grad():
        labels = switchable.model(x).argmax(-1)
    seen: list[list[str]] = []

    def accuracy(model: nn.Module) -> torch.Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append([type(m).__name__ for m in model if hasattr(m, "weight")])
        return (model(x).argmax(-1) == labels).float().mean()

    switchable.model.train()
    task = TaskMetric(switchable, accuracy)
    assert task((0, 0, 0)) == 0
    assert task.baseline == 1.0
    drop = task((2, 0, 2))
    assert drop == 1.0 - task.value((2, 0, 2)) > 0
    assert seen == [["Linear"] * 3, *[["QLinear", "Linear", "QLinear"]] * 2]
    assert task.forward_passes == 3
    assert switchable.model.training
    error = TaskMetric(switchable, lambda model: 1 - accuracy(model), higher_is_better=False)
    assert error((2, 0, 2)) == pytest.approx(drop)


def test_bad_input_is_refused() -> None:
    switchable = _switchable()
    with pytest.raises(ArgumentError, match="batches"):
        LossOfOutputs(switchable, "kl", [])
    with pytest.raises(ArgumentError, match="batches"):
        LossOfOutputs(SwitchableModel(switchable.model, ("fp32", "W8A8Dynamic")))((1, 0, 0))
    with pytest.raises(ArgumentError, match="metric"):
        LossOfOutputs(switchable, "accuracy")
    with pytest.raises(ArgumentError, match="eval_fn"):
        TaskMetric(switchable, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="eval_fn"):
        TaskMetric(switchable, lambda model: "good").baseline  # noqa: B018
    with pytest.raises(NonFiniteError, match=r"0: int4, 2: fp32, 4: fp32"):
        TaskMetric(switchable, lambda model: float("nan")).value((2, 0, 0))
    with pytest.raises(ArgumentError, match="higher_is_better"):
        TaskMetric(switchable, lambda model: 1.0, higher_is_better=1)  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match="batch 1"):
        LossOfOutputs(switchable, "mse", [torch.ones(1, 24), torch.full((1, 24), float("nan"))])((1, 0, 0))
