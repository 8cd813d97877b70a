"""Expected gains against hypervolumes that are computed from scratch."""

from __future__ import annotations

import numpy as np
import pytest
from search_problems import decreasing

from pyquant.mixed_precision.solve import Constraint
from pyquant.mixed_precision.solve.acquire import Stairs, candidates, expected_gains, likely_savings, neighbours
from pyquant.mixed_precision.solve.predict import Model
from pyquant.report.records.pareto import hypervolume


@pytest.mark.parametrize("seed", range(10))
def test_gains_are_differences_of_hypervolumes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    corner = (8.0, 8.0)
    points = [tuple(p) for p in rng.integers(0, 11, (int(rng.integers(0, 9)), 2)).astype(float).tolist()]
    new = rng.integers(0, 11, (20, 2)).astype(float)
    stairs = Stairs(points, corner)
    gains = stairs.gains(new[:, 0], new[:, 1:])[:, 0]
    before = hypervolume(points, corner)
    assert stairs.volume == before
    assert gains.tolist() == [hypervolume([*points, tuple(p)], corner) - before for p in new.tolist()]
    assert stairs.adding(tuple(new[0].tolist())).volume == before + gains[0]


def test_expected_gains_are_means_over_what_is_possible() -> None:
    problem = decreasing(4)
    model = Model(problem, [((2, 2, 2, 2), problem.loss_of((2, 2, 2, 2)) * 1.2)])
    corner = (problem.cost_of((0,) * 4), problem.loss_of((2,) * 4))
    pool = [(0, 0, 2, 2), (2, 0, 0, 0), (1, 1, 1, 1)]
    stairs = Stairs([], corner)
    gains, costs, mean = expected_gains(model, stairs, pool)
    deviation = model.predict(pool).deviation
    drawn = mean[:, None] + deviation[:, None] * np.random.default_rng(0).standard_normal((3, 20_000))
    np.testing.assert_allclose(gains, stairs.gains(costs, drawn).mean(axis=1), rtol=0.02)


def test_savings_are_chances_times_costs() -> None:
    problem = decreasing(4)
    model = Model(problem, [])
    pool = [(0, 0, 2, 2), (2, 2, 2, 2)]
    mean, deviation = model.predict(pool)
    limit = float(mean[0] + deviation[0])
    found = likely_savings(model, pool, problem.cost_of((0, 0, 0, 2)), limit)
    drawn = mean[:, None] + deviation[:, None] * np.random.default_rng(0).standard_normal((2, 50_000))
    chance = (drawn <= limit).mean(axis=1)
    saved = problem.cost_of((0, 0, 0, 2)) - np.array([problem.cost_of(c) for c in pool])
    np.testing.assert_allclose(found, saved * chance, rtol=0.02, atol=0.01)
    assert likely_savings(model, pool, 0.0, limit).tolist() == [0.0, 0.0]


def test_candidates_keep_constraints_and_neighbours_are_one_change_away() -> None:
    bits = np.tile([16.0, 8.0, 4.0], (5, 1))
    problem = decreasing(5).with_(constraints=(Constraint("bits", bits, 40.0),))
    pool = candidates(Model(problem, []), np.random.default_rng(0), 0.0)
    assert len(pool) > 5
    assert all(sum(bits[0, f] for f in c) <= 40 for c in pool)
    near = neighbours(problem, [(2, 2, 2, 2, 2)])
    assert all(sum(f != 2 for f in c) <= 1 for c in near)
    assert len(near) == 11
