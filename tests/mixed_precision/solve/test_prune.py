"""Never slower: what is dropped, why, and that the front does not notice."""

from __future__ import annotations

import numpy as np
import pytest
from search_problems import FORMATS, brute_front, random_problem

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve import Constraint, SearchProblem, drop_slower


@pytest.mark.parametrize("seed", range(16))
def test_dominated_options_are_no_loss(seed: int) -> None:
    """Without the float option there is only the second rule, which must not touch the front."""
    problem = random_problem(seed, groups=5)
    mask = np.array(problem.mask)
    mask[:, 0], mask[:, 1] = False, True
    problem = problem.with_(allowed=mask)
    pruned, dropped = drop_slower(problem)
    assert int(problem.mask.sum() - pruned.mask.sum()) == len(dropped)
    before, after = brute_front(problem), brute_front(pruned)
    assert [p[1:] for p in before] == [p[1:] for p in after]


def test_something_is_dropped_in_some_problem() -> None:
    assert sum(len(drop_slower(random_problem(s, groups=5))[1]) for s in range(16)) > 10


def test_int4_that_is_slower_than_int8_is_never_chosen() -> None:
    problem = SearchProblem(("a", "b"), FORMATS, [[0, 1, 2], [0, 1, 2]], [[8, 5, 6], [8, 5, 4]])
    pruned, dropped = drop_slower(problem)
    assert pruned.mask.tolist() == [[True, True, False], [True, True, True]]
    assert [(d.group, d.format, d.reason) for d in dropped] == [("a", "int4", "costs and loses no less than int8")]


@pytest.mark.parametrize(("margin", "kept"), [(0.0, True), (0.01, False), (0.5, False)])
def test_the_margin(margin: float, kept: bool) -> None:
    problem = SearchProblem(("a",), FORMATS[:2], [[0, -1]], [[8, 7.95]])
    assert drop_slower(problem, margin)[0].mask[0, 1] == kept


def test_an_option_that_saves_conversions_stays() -> None:
    """In the middle int8 is slower than float by itself, but spares two conversions."""
    cost = [[8, 4], [8, 9], [8, 4]]
    pairs = np.broadcast_to(2.0 * (1 - np.eye(2)), (2, 2, 2))
    problem = SearchProblem(("a", "b", "c"), FORMATS[:2], [[0, 1]] * 3, cost, cost_pairs=pairs)
    assert drop_slower(problem)[0].mask.all()
    assert drop_slower(problem.with_(cost_pairs=None))[0].mask.tolist() == [[True, True], [True, False], [True, True]]
    # and when the neighbours cannot be int8, nothing is spared
    alone = problem.with_(allowed=[[True, False], [True, True], [True, False]])
    assert drop_slower(alone)[0].mask[1].tolist() == [True, False]


def test_what_keeps_a_constraint_stays() -> None:
    size = Constraint("size", [[4.0, 2.0, 1.0]], 10)
    problem = SearchProblem(("a",), FORMATS, [[0, 1, 2]], [[8, 5, 6]])
    assert drop_slower(problem)[0].mask.tolist() == [[True, True, False]]
    assert drop_slower(problem.with_(constraints=(size,)))[0].mask.all()


@pytest.mark.parametrize("margin", [0.0, 0.01, 0.5])
def test_what_is_slower_and_keeps_a_constraint_stays(margin: float) -> None:
    """Limits come before "never slower": int8 costs 2 % more than float here, and is the way to few bits."""
    loss, cost = [[0, 1, 2], [0, 1, 2]], [[8, 8.16, 9], [80, 40, 20]]
    problem = SearchProblem(("a", "b"), FORMATS, loss, cost)
    assert drop_slower(problem, margin)[0].mask[0].tolist() == [True, False, False]
    bits = Constraint("effective_bits", np.tile([16.0, 8.0, 4.0], (2, 1)) / 2, 8.0)
    assert drop_slower(problem.with_(constraints=(bits,)), margin)[0].mask[0].all()
    time = Constraint("latency_us", cost, 100.0)  # what is slower keeps no limit on time
    assert drop_slower(problem.with_(constraints=(time,)), margin)[0].mask[0].tolist() == [True, False, False]


def test_refuses_margins_that_are_none() -> None:
    for margin in (-0.1, 1.0, float("nan")):
        with pytest.raises(ArgumentError, match="never_slower_margin"):
            drop_slower(random_problem(0), margin)
