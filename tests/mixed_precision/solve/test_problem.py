"""The problem: totals, what is refused, and the fingerprint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from search_problems import brute_front, every_config, random_problem

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve import Constraint, SearchProblem

GOOD: dict[str, Any] = {
    "groups": ("a", "b"),
    "formats": ("fp32", "int4"),
    "loss": [[0, 1], [0, 2]],
    "cost": [[4, 1], [4, 2]],
}


@pytest.mark.parametrize("seed", range(5))
def test_totals_equal_sums_written_out(seed: int) -> None:
    problem = random_problem(seed)
    configs = every_config(problem)
    assert problem.costs_of(configs).tolist() == [problem.cost_of(c) for c in configs]
    for config, cost, loss in brute_front(problem):
        assert (problem.cost_of(config), problem.loss_of(config)) == (cost, loss)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups", ()),
        ("groups", ("a", "a")),
        ("groups", "ab"),
        ("formats", ("x", 3)),
        ("loss", [[0, float("nan")], [0, 1]]),
        ("loss", [[0, float("inf")], [0, 1]]),
        ("loss", [[0, 1]]),
        ("loss", "text"),
        ("cost", [[4, -1], [4, 2]]),
        ("cost", [[4, 1], [4, float("inf")]]),
        ("cost", [[4, 1], [4]]),
        ("cost_pairs", [[[0, 1], [1, -1]]]),
        ("cost_pairs", [[0, 1], [1, 0]]),
        ("loss_pairs", [[[0, 1], [1, float("nan")]]]),
        ("cost_base", -1.0),
        ("cost_base", True),
        ("loss_base", float("nan")),
        ("allowed", [[1, 1], [1, 1]]),
        ("allowed", [[True, True], [False, False]]),
        ("constraints", (3,)),
        ("constraints", (Constraint("size", [[1.0]], 3),)),
    ],
)
def test_refuses_and_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        SearchProblem(**{**GOOD, field: value})
    assert error.value.argument == field


def test_refuses_constraints_that_cannot_be_read() -> None:
    size = Constraint("size", [[1.0, 1.0], [1.0, 1.0]], 3)
    with pytest.raises(ArgumentError, match="a name for each"):
        SearchProblem(**GOOD, constraints=(size, size))
    for limit in (-1.0, float("nan")):
        with pytest.raises(ArgumentError, match="limit of 'size'"):
            Constraint("size", [[1.0]], limit)


def test_what_is_not_allowed_may_be_anything() -> None:
    problem = SearchProblem(**{**GOOD, "cost": [[4, 1], [4, float("nan")]]}, allowed=[[True, True], [True, False]])
    assert problem.cost[1, 1] == 0
    assert problem.uniform(1) == (1, 0)
    assert problem.num_configs == 2
    with pytest.raises(ArgumentError, match="'int4' for 'b'"):
        problem.cost_of((0, 1))


@pytest.mark.parametrize("config", [(0,), (0, 2), (0, -1), (0, 0.5)])
def test_configurations_of_other_problems_are_refused(config: Any) -> None:
    with pytest.raises(ArgumentError, match="config"):
        SearchProblem(**GOOD).loss_of(config)


def test_tables_are_copies_that_nobody_can_write() -> None:
    loss = np.array([[0.0, 1.0], [0.0, 2.0]])
    problem = SearchProblem(**{**GOOD, "loss": loss})
    loss[:] = 9
    assert problem.loss_of((1, 1)) == 3
    with pytest.raises(ValueError, match="read-only"):
        problem.loss[0, 0] = 1


def test_the_fingerprint_sees_every_field() -> None:
    size = Constraint("size", [[2.0, 1.0], [2.0, 1.0]], 3)
    changes: list[dict[str, Any]] = [
        {},
        {"groups": ("a", "c")},
        {"formats": ("fp32", "int8")},
        {"loss": [[0, 1], [0, 2.0000001]]},
        {"cost": [[4, 1], [4, 1]]},
        {"cost_base": 1.0},
        {"loss_base": 1e-300},
        {"cost_pairs": np.zeros((1, 2, 2))},
        {"loss_pairs": np.zeros((1, 2, 2))},
        {"allowed": [[True, True], [True, False]]},
        {"constraints": (size,)},
        {"constraints": (Constraint("size", size.table, 4),)},
        {"constraints": (Constraint("bits", size.table, 3),)},
    ]
    found = [SearchProblem(**{**GOOD, **change}).fingerprint() for change in changes]
    assert len(set(found)) == len(changes)
    assert SearchProblem(**GOOD).fingerprint() == found[0]


def test_rounding_of_a_sum_violates_no_limit() -> None:
    """Ten layers of 8 bits, a tenth of the weights each, are 8 bits; in floats some sums are a little more."""
    table = np.array([[0.8, 0.4]] * 10) * (1 + 2e-16)
    constraint = Constraint("effective_bits", table, 8.0)
    assert constraint.cost_of((0,) * 10) > 8.0
    assert constraint.allows((0,) * 10)
    assert not Constraint("effective_bits", table, 7.9999).allows((0,) * 10)
