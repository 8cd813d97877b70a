"""Bisection: how many evaluations, and the right number of groups."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pyquant.mixed_precision.solve import SearchProblem, search_front


def _problem(groups: int) -> SearchProblem:
    loss = np.zeros((groups, 3))
    loss[:, 1] = np.arange(1, groups + 1)
    loss[:, 2] = 10 * np.arange(1, groups + 1)
    return SearchProblem(tuple(f"g{i}" for i in range(groups)), ("fp32", "int8", "int4"), loss, [[9, 6, 4]] * groups)


@pytest.mark.parametrize("groups", [1, 2, 7, 16, 40])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_it_finds_as_many_groups_as_can_be_lowered(groups: int, share: float) -> None:
    problem = _problem(groups)
    limit = share * problem.loss_of((2,) * groups)
    points = search_front(problem, problem.loss_of, 100, algorithm="bisection", max_loss=limit)
    assert len(points) <= 2 * math.ceil(math.log2(groups + 1)) + 2
    # the groups are sorted by sensitivity here: a prefix in int8, of it a prefix in int4
    eight = max(k for k in range(groups + 1) if problem.loss_of((1,) * k + (0,) * (groups - k)) <= limit)
    rest = (0,) * (groups - eight)
    four = max(k for k in range(eight + 1) if problem.loss_of((2,) * k + (1,) * (eight - k) + rest) <= limit)
    expected = (2,) * four + (1,) * (eight - four) + rest
    kept = [p for p in points if p.loss <= limit]
    found = min(kept, key=lambda p: p.cost).config if kept else (0,) * groups
    assert found == expected


def test_the_order_is_that_of_the_table() -> None:
    problem = _problem(4)
    turned = problem.with_(loss=problem.loss[::-1])
    points = search_front(turned, turned.loss_of, 100, algorithm="bisection", max_loss=3.0)
    assert min((p for p in points if p.loss <= 3.0), key=lambda p: p.cost).config == (0, 0, 1, 1)


def test_without_a_limit_there_is_a_front() -> None:
    problem = _problem(12)
    points = search_front(problem, problem.loss_of, 100, algorithm="bisection")
    assert len({p.config for p in points}) == len(points) > 8
