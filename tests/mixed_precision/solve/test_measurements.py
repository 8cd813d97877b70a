"""Budget, cache, known losses, and what an evaluation may return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from search_problems import decreasing

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve.measurements import BudgetSpent, Measured, Measurements
from pyquant.mixed_precision.solve.problem import Config

PROBLEM = decreasing(3).with_(loss_base=0.5)
A, B, C, FLOAT = (0, 1, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0)


def test_every_configuration_is_evaluated_once() -> None:
    calls: list[Config] = []

    def evaluate(config: Config) -> float:
        calls.append(config)
        return float(len(calls))

    found = Measurements(PROBLEM, evaluate, 5, known={C: 9.0})
    assert found.measure([A, B, A, C, FLOAT]) == [1.0, 2.0, 1.0, 9.0, 0.5]
    assert found.measure([B], [7.0]) == [2.0]
    assert (calls, found.left) == ([A, B], 3)
    assert found.points[0] == Measured(A, PROBLEM.cost_of(A), 1.0, PROBLEM.loss_of(A))
    assert found.losses == {FLOAT: 0.5, C: 9.0, A: 1.0, B: 2.0}


def test_the_float_configuration_is_measured_where_its_loss_is_not_known() -> None:
    loss = PROBLEM.loss.copy()
    loss[1, 0] = 0.1
    found = Measurements(PROBLEM.with_(loss=loss), lambda c: 3.0, 5)
    assert found.measure([FLOAT]) == [3.0]


def test_the_budget_is_spent_to_the_last_and_no_further() -> None:
    calls: list[Config] = []
    found = Measurements(PROBLEM, lambda c: calls.append(c) or 1.0, 2)  # type: ignore[func-returns-value]
    with pytest.raises(BudgetSpent):
        found.measure([A, B, C])
    assert calls == [A, B] == [p.config for p in found.points]
    assert found.measure([A]) == [1.0]
    with pytest.raises(BudgetSpent):
        found.measure([C])


def test_several_at_once_are_the_same() -> None:
    batches: list[list[Config]] = []

    def many(configs: Sequence[Config]) -> list[float]:
        batches.append(list(configs))
        return [float(sum(c)) for c in configs]

    one, several = (Measurements(PROBLEM, lambda c: float(sum(c)), 3, evaluate_many=m) for m in (None, many))
    assert one.measure([A, FLOAT, B, A]) == several.measure([A, FLOAT, B, A])
    assert one.points == several.points
    assert batches == [[A, B]]


@pytest.mark.parametrize("loss", [float("nan"), float("-inf"), None, "x"])
def test_losses_that_are_none_are_refused(loss: Any) -> None:
    with pytest.raises(ArgumentError, match="evaluate"):
        Measurements(PROBLEM, lambda c: loss, 3).measure([A])
    assert Measurements(PROBLEM, lambda c: float("inf"), 3).measure([A]) == [float("inf")]


def test_refuses_wrong_arguments() -> None:
    for budget in (0, -1, True, 2.5):
        with pytest.raises(ArgumentError, match="budget"):
            Measurements(PROBLEM, lambda c: 1.0, budget)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="evaluate_many"):
        Measurements(PROBLEM, lambda c: 1.0, 3, evaluate_many=lambda c: [1.0]).measure([A, B])
    with pytest.raises(ArgumentError, match="config"):
        Measurements(PROBLEM, lambda c: 1.0, 3, known={(0, 1): 1.0})
