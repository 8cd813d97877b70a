"""The choice under a limit: bisection with few evaluations, and no belief in luck."""

from __future__ import annotations

import random

import pytest

from pyquant.mixed_precision.accuracy_limit import isotonic, within_limit


@pytest.mark.parametrize("seed", range(10))
def test_isotonic_is_the_nearest_rising_sequence(seed: int) -> None:
    rng = random.Random(seed)
    values = [float(rng.randrange(6)) for _ in range(5)]
    found = isotonic(values)
    assert found == sorted(found)
    error = sum((a - b) ** 2 for a, b in zip(found, values, strict=True))
    grid = [i / 4 for i in range(21)]

    def rising(prefix: list[float]) -> float:  # the best rising sequence on a grid cannot be nearer
        if len(prefix) == len(values):
            return sum((a - b) ** 2 for a, b in zip(prefix, values, strict=True))
        return min(rising([*prefix, g]) for g in grid if not prefix or g >= prefix[-1])

    assert error <= rising([]) + 1e-9


@pytest.mark.parametrize("edge", range(-1, 30))
def test_a_monotone_drop_is_cut_exactly_with_few_evaluations(edge: int) -> None:
    losses = [float(i) for i in range(30)]
    random.Random(1).shuffle(losses)
    asked: list[int] = []

    def drop_of(i: int) -> float:
        asked.append(i)
        return 0.0 if losses[i] <= edge else 1.0

    kept, drops = within_limit(losses, drop_of, 0.5, 8)
    assert len(asked) == len(set(asked)) <= 8
    assert set(drops) == set(asked)
    assert all(losses[i] <= edge for i in kept)
    assert max((losses[i] for i in kept), default=-1) == edge


def test_a_lucky_point_among_bad_ones_is_not_kept() -> None:
    losses = [0.0, 1.0, 2.0, 3.0, 4.0]
    drops = [0.0, 0.005, 0.03, 0.009, 0.04]  # the fourth one passes alone, its neighbours say that it is luck
    kept, _ = within_limit(losses, lambda i: drops[i], 0.01, 5)
    assert kept == [0, 1]


def test_none_holds_and_none_is_there() -> None:
    assert within_limit([0.0, 1.0], lambda i: 1.0, 0.1, 4)[0] == []
    assert within_limit([], lambda i: 0.0, 0.1, 4) == ([], {})
