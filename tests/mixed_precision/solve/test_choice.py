"""The plan: the best that keeps every limit, and a clear word where none does."""

from __future__ import annotations

import pytest

from pyquant.errors import ArgumentError, InfeasibleError
from pyquant.mixed_precision.solve import Constraint, Measured, choose

SIZE = Constraint("size_bytes", [[20.0, 10.0, 5.0]] * 2, limit=25.0)
POINTS = [
    Measured((0, 0), 10.0, 0.0, 0.0),
    Measured((0, 1), 7.0, 0.1, 0.1),
    Measured((1, 1), 5.0, 0.3, 0.3),
    Measured((1, 2), 5.0, 0.2, 0.3),
    Measured((2, 2), 3.0, 0.9, 0.8),
]


def test_the_best_that_keeps_every_limit() -> None:
    assert choose(POINTS).config == (2, 2)
    assert choose(POINTS, "loss").config == (0, 0)
    assert choose(POINTS, max_loss=0.3).config == (1, 2)  # of equal costs the smaller loss
    assert choose(POINTS, max_loss=0.1).config == (0, 1)  # the limit itself is kept
    assert choose(POINTS, "loss", max_cost=6.0).config == (1, 2)
    assert choose(POINTS, "loss", constraints=(SIZE,)).config == (1, 2)
    assert choose(POINTS[::-1], max_loss=0.3).config == (1, 2)


def test_nothing_keeps_them() -> None:
    with pytest.raises(InfeasibleError, match=r"none of 5 .* <= 0.15, cost <= 6; the nearest, \(0, 1\), has cost 7"):
        choose(POINTS, max_loss=0.15, max_cost=6.0)
    with pytest.raises(InfeasibleError, match="size_bytes") as error:
        choose(POINTS[:2], constraints=(SIZE,), max_loss=0.5)
    assert error.value.nearest == POINTS[1]
    broken = [Measured((2, 2), 1.0, float("inf"), 0.0), Measured((1, 1), 1.0, 5.0, 0.0)]
    with pytest.raises(InfeasibleError) as error:
        choose(broken, max_loss=1.0)
    assert error.value.nearest == broken[1]


def test_refuses() -> None:
    with pytest.raises(ArgumentError, match="points"):
        choose([])
    with pytest.raises(ArgumentError, match="objective"):
        choose(POINTS, "speed")
    with pytest.raises(ArgumentError, match="max_loss"):
        choose(POINTS, max_loss=float("nan"))
