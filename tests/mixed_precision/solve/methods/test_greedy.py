"""Greedy: the path, and what is taken back."""

from __future__ import annotations

import itertools

import pytest
from search_problems import decreasing

from pyquant.mixed_precision.solve import SearchProblem, search_front

PROBLEM = SearchProblem(("a", "b", "c"), ("fp32", "int8", "int4"), [[0, 1, 3], [0, 2, 9], [0, 8, 9]], [[9, 6, 4]] * 3)


def test_the_path_takes_the_best_saving_for_the_loss() -> None:
    path = [p.config for p in search_front(PROBLEM, PROBLEM.loss_of, algorithm="greedy")]
    assert path[:2] == [(1, 0, 0), (1, 1, 0)]
    assert path[-1] == (2, 2, 2)
    for a, b in itertools.pairwise([(0, 0, 0), *path]):
        assert sum(x != y for x, y in zip(a, b, strict=True)) == 1
        assert PROBLEM.cost_of(b) < PROBLEM.cost_of(a)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.6])
def test_within_a_loss_it_ends_where_no_group_can_go_further(share: float) -> None:
    problem = decreasing(5, 2)
    limit = share * problem.loss_of((2,) * 5)
    points = search_front(problem, problem.loss_of, 100, algorithm="greedy", max_loss=limit)
    assert len(points) <= 5 * 2
    kept = [p for p in points if p.loss <= limit]
    best = min(kept, key=lambda p: p.cost)
    assert best.cost < problem.cost_of((0,) * 5)
    assert len(kept) < len(points)


def test_a_task_metric_that_differs_from_the_tables_decides() -> None:
    points = search_front(PROBLEM, lambda c: float(c[0] > 0), 100, algorithm="greedy", max_loss=0.5)
    assert min(points, key=lambda p: (p.loss, p.cost)).config == (0, 2, 2)
