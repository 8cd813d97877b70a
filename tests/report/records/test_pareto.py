"""Fronts and hypervolumes against brute force."""

from __future__ import annotations

import random

import pytest

from pyquant.report.records.pareto import hypervolume, pareto_front


def _dominated(p: tuple[float, float], points: list[tuple[float, float]]) -> bool:
    return any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)


@pytest.mark.parametrize("seed", range(20))
def test_front_is_the_set_of_points_that_none_dominates(seed: int) -> None:
    rng = random.Random(seed)
    points = [(float(rng.randrange(8)), float(rng.randrange(8))) for _ in range(rng.randrange(1, 40))]
    front = pareto_front(points)
    assert {points[i] for i in front} == {p for p in points if not _dominated(p, points)}
    assert len(front) == len({points[i] for i in front})
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


@pytest.mark.parametrize("seed", range(20))
def test_hypervolume_counts_the_unit_squares_that_are_dominated(seed: int) -> None:
    rng = random.Random(seed)
    points = [(float(rng.randrange(12)), float(rng.randrange(12))) for _ in range(rng.randrange(0, 20))]
    squares = sum(any(p[0] <= x and p[1] <= y for p in points) for x in range(10) for y in range(10))
    assert hypervolume(points, (10.0, 10.0)) == squares


def test_nothing_gives_nothing_and_nan_raises() -> None:
    assert pareto_front([]) == []
    assert hypervolume([], (1.0, 1.0)) == 0.0
    assert pareto_front([(1.0, float("inf"))]) == [0]
    with pytest.raises(ValueError, match="NaN"):
        pareto_front([(1.0, float("nan"))])
