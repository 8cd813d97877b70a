"""The exact front: equal to brute force, with pairs, ties and forbidden options; and how little work it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from search_problems import brute_front, decreasing, random_problem

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve import SearchProblem, exact_front
from pyquant.mixed_precision.solve import front as dynamic_programme


class Work:
    """Of exact_front: partial configurations generated, and the most that one group retained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generated = self.peak = 0
        extend = dynamic_programme._extended

        def extended(states: Any, cost: Any, loss: Any, formats: Any, cell: float) -> Any:
            self.generated += len(states.cost) * len(formats)
            kept = extend(states, cost, loss, formats, cell)
            self.peak = max(self.peak, len(kept.cost))
            return kept

        monkeypatch.setattr(dynamic_programme, "_extended", extended)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


@pytest.mark.parametrize("seed", range(24))
def test_front_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed, top=2 + seed % 8, pairs=seed % 4 != 0)
    assert [tuple(c) for c in exact_front(problem)] == brute_front(problem)


def test_front_of_floats_is_the_same_numbers() -> None:
    problem = decreasing(6)
    front = exact_front(problem)
    assert [(c.cost, c.loss) for c in front] == [(problem.cost_of(c.config), problem.loss_of(c.config)) for c in front]
    np.testing.assert_allclose([c[1:] for c in front], [p[1:] for p in brute_front(problem)], rtol=1e-12)


@pytest.mark.parametrize("forgotten", ["cost_pairs", "loss_pairs", "allowed", "cost_base"])
def test_the_comparison_sees_what_a_solver_forgets(forgotten: str) -> None:
    seen = 0
    for seed in range(8):
        problem = random_problem(seed)
        value = {"allowed": np.ones((6, 3), bool), "cost_base": 0.0}.get(forgotten)
        wrong = exact_front(dataclasses.replace(problem, **{forgotten: value}))
        seen += [tuple(c) for c in wrong] != brute_front(problem)
    assert seen == 8


def test_one_group_and_one_format() -> None:
    one = SearchProblem(("a",), ("fp32", "int8"), [[0, 1]], [[4, 4]])
    assert [c.config for c in exact_front(one)] == [(0,)]
    single = SearchProblem(("a", "b"), ("fp32",), [[0], [0]], [[4], [4]])
    assert [tuple(c) for c in exact_front(single)] == [((0, 0), 8.0, 0.0)]


def test_twelve_groups_are_little_work(work: Work) -> None:
    front = exact_front(decreasing(12))
    assert len(front) > 30
    assert work.generated < 20_000  # of 531 441 configurations


def test_every_beginning_is_needed_where_all_trade(work: Work) -> None:
    """Powers of two: no beginning dominates another, and the front is every configuration. The work shows it."""
    groups = 7
    weights = 3.0 ** np.arange(groups)[:, None] * np.arange(3)
    problem = SearchProblem(tuple(map(str, range(groups))), ("a", "b", "c"), weights, weights[:, ::-1])
    assert len(exact_front(problem)) == 3**groups
    assert work.peak == 3**groups


@pytest.mark.parametrize("epsilon", [0.001, 0.05])
def test_a_coarse_front_is_as_near_as_it_says(epsilon: float) -> None:
    for seed in range(4):
        problem = decreasing(12, seed)
        exact, coarse = exact_front(problem), exact_front(problem, epsilon)
        room = epsilon * (problem.cost.max(axis=1) - problem.cost.min(axis=1)).sum()
        for point in exact:
            assert any(c.loss <= point.loss and c.cost <= point.cost + room for c in coarse)


def test_a_coarse_front_bounds_the_work(work: Work) -> None:
    groups = 10
    weights = 2.0 ** np.arange(groups)[:, None] * np.array([0.0, 1.0])
    problem = SearchProblem(tuple(map(str, range(groups))), ("a", "b"), weights, weights[:, ::-1])
    assert len(exact_front(problem, 0.1)) < 300
    assert work.peak < 600
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(ArgumentError, match="epsilon"):
            exact_front(problem, wrong)


def test_thirty_six_groups_stay_small(work: Work) -> None:
    assert len(exact_front(decreasing(36))) > 100
    assert work.generated < 500_000
