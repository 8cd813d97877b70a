"""One call for every algorithm: what all of them must keep, and what search_front refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from search_problems import decreasing

from pyquant.core.registry import SEARCH_ALGORITHMS
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve import (
    Config,
    Constraint,
    Search,
    SearchProblem,
    search_algorithm,
    search_front,
)

NEEDS_PYMOO = pytest.mark.skipif(importlib.util.find_spec("pymoo") is None, reason="pymoo is not installed")
NAMES = [pytest.param(n, marks=NEEDS_PYMOO) if n == "nsga2" else n for n in sorted(SEARCH_ALGORITHMS)]
PROBLEM = decreasing(4)


def _budget(name: str) -> int:
    return 81 if name == "exhaustive" else 12


def _evaluate(config: Config) -> float:
    return PROBLEM.loss_of(config) * (1 + 0.05 * config[0] * config[1])


def test_the_names() -> None:
    assert tuple(sorted(SEARCH_ALGORITHMS)) == ("bisection", "dp", "exhaustive", "greedy", "nsga2")


@pytest.mark.parametrize("name", NAMES)
def test_points_are_what_was_evaluated_in_order_and_once(name: str) -> None:
    calls: list[Config] = []

    def evaluate(config: Config) -> float:
        calls.append(config)
        return _evaluate(config)

    points = search_front(PROBLEM, evaluate, _budget(name), algorithm=name)
    assert [p.config for p in points] == calls
    assert 3 <= len(calls) == len(set(calls)) <= _budget(name)
    for p in points:
        assert (p.cost, p.loss) == (PROBLEM.cost_of(p.config), _evaluate(p.config))


@pytest.mark.parametrize("name", NAMES)
def test_equal_arguments_give_equal_results(name: str, tmp_path: Any) -> None:
    first, second = (search_front(PROBLEM, _evaluate, _budget(name), algorithm=name, rng_seed=3) for _ in range(2))
    assert first == second
    journal = tmp_path / "journal"
    assert search_front(PROBLEM, _evaluate, _budget(name), algorithm=name, rng_seed=3, journal=journal) == first

    def never(config: Config) -> float:
        raise AssertionError(config)

    assert search_front(PROBLEM, never, _budget(name), algorithm=name, rng_seed=3, journal=journal) == first


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 3])
def test_who_evaluates_a_batch_does_not_matter(name: str, batch: int) -> None:
    kw: dict[str, Any] = {"algorithm": name, "batch": batch}
    one = search_front(PROBLEM, _evaluate, _budget(name), **kw)
    many = search_front(
        PROBLEM, _evaluate, _budget(name), **kw, evaluate_many=lambda cs: [_evaluate(c) for c in reversed(cs)][::-1]
    )
    assert one == many


@pytest.mark.parametrize("name", NAMES)
def test_constraints_and_forbidden_options_are_kept(name: str) -> None:
    bits = np.tile([16.0, 8.0, 4.0], (4, 1))
    mask = np.ones((4, 3), bool)
    mask[2, 2] = mask[0, 1] = False
    problem = PROBLEM.with_(constraints=(Constraint("bits", bits, 40.0),), allowed=mask)
    for max_loss in (None, PROBLEM.loss_of((2,) * 4) / 2):
        points = search_front(problem, _evaluate, _budget(name), algorithm=name, max_loss=max_loss)
        assert all(mask[range(4), p.config].all() for p in points)
        outside = [p for p in points if sum(bits[0, f] for f in p.config) > 40]
        assert [p.config for p in outside] == [], outside
        assert points or name == "bisection"


@pytest.mark.parametrize("name", NAMES)
def test_one_group(name: str) -> None:
    problem = SearchProblem(("a",), ("fp32", "int8"), [[0, 1]], [[4, 2]])
    points = search_front(problem, lambda c: 1.5 * c[0], 5, algorithm=name, corner=(5, 3))
    assert (1,) in [p.config for p in points]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("algorithm", "simulated"),
        ("batch", 0),
        ("batch", True),
        ("batch", 1.5),
        ("stop_gain", -1.0),
        ("stop_gain", float("nan")),
        ("budget", 0),
        ("seeds", [(0, 9, 0, 0)]),
        ("known", {(0,): 1.0}),
        ("corner", (1.0, float("nan"))),
        ("corner", 3),
        ("max_loss", float("nan")),
        ("never_slower_margin", 2.0),
        ("rng_seed", -1),
    ],
)
def test_refuses_and_names_the_argument(argument: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        search_front(PROBLEM, _evaluate, **{argument: value})
    assert error.value.argument in (argument, "config")


@pytest.fixture
def own_algorithm() -> Iterator[None]:
    @search_algorithm("own")
    def own(search: Search) -> None:
        while True:
            search.measure([(1, 1, 1, 1)])
            search.measure([(2, 1, 1, 1), (2, 2, 1, 1), (2, 2, 2, 1)])

    yield
    SEARCH_ALGORITHMS.remove("own")


@pytest.mark.usefixtures("own_algorithm")
def test_an_algorithm_of_ones_own_is_one_function() -> None:
    points = search_front(PROBLEM, _evaluate, 3, algorithm="own")
    assert [p.config for p in points] == [(1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1)]
    with pytest.raises(ArgumentError, match="not taken"):
        search_algorithm("own")
