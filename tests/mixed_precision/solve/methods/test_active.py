"""The loop itself, and the bars: hypervolume against exhaustive tables and a twelve-layer net."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from search_problems import decreasing

from pyquant.mixed_precision.solve import Constraint, exact_front, search_front
from pyquant.report.records.pareto import hypervolume

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))
from bench.search_cases import Case, TwelveLayers, interacting, polished, table_cases
from bench.search_methods import dp_only

CASES = list(table_cases())
ENOUGH = (0.98, 0.995)  # of the exhaustive front after 20 and 40 evaluations


def _ratios(case: Case, **options: object) -> tuple[float, float]:
    calls: list[tuple[int, ...]] = []

    def evaluate(config: tuple[int, ...]) -> float:
        calls.append(config)
        return case.evaluate(config)

    points = search_front(case.problem, evaluate, 40, **options)  # type: ignore[arg-type]
    assert [p.config for p in points] == calls
    assert len(set(calls)) == len(calls) <= 40
    return case.ratio(points[:20]), case.ratio(points)


def test_there_are_enough_cases() -> None:
    assert len(CASES) == 48
    assert {c.name.split(".")[0] for c in CASES} == {"digits", "bytemlp", "gpt3", "gpt3x"}


@pytest.mark.parametrize("model", ["digits", "bytemlp", "gpt3", "gpt3x"])
def test_worst_hypervolume_of_all_tables(model: str) -> None:
    cases = [c for c in CASES if c.name.startswith(model + ".")]
    assert len(cases) == 12
    # every second one here; python -m bench.search_methods runs them all
    found = np.array([_ratios(c) for c in cases[::2] + cases[1:2]])
    assert (found.min(axis=0) >= ENOUGH).all(), found.min(axis=0)
    assert (found <= 1 + 1e-12).all()


def test_worst_hypervolume_of_the_whole_front() -> None:
    """The corner at all that int4 loses, where the cheap end counts; the search is told of no corner."""
    found = []
    for case in CASES[1::5]:
        corner = (case.corner[0], case.evaluate((2,) * 6))
        every = [tuple(c) for c in np.ndindex(*(3,) * 6)]
        best = hypervolume([(case.problem.cost_of(c), case.evaluate(c)) for c in every], corner)
        found.append(_ratios(Case(case.name, case.problem, case.evaluate, corner, best)))
    assert (np.min(found, axis=0) >= ENOUGH).all(), np.min(found, axis=0)


@pytest.mark.parametrize("model", ["bytemlp", "gpt3x"])
def test_worst_hypervolume_with_tables_that_are_far_off(model: str) -> None:
    """Scores of another data set or of a gradient are not the losses themselves: off by a factor of 2, up or down."""
    found = []
    for i, case in enumerate([c for c in CASES if c.name.startswith(model + ".")][::4]):
        factors = np.exp(np.log(2) * np.random.default_rng(i).standard_normal(case.problem.loss.shape))
        problem = case.problem.with_(loss=case.problem.loss * factors)
        found.append(_ratios(Case(case.name, problem, case.evaluate, case.corner, case.best)))
    assert (np.min(found, axis=0) >= ENOUGH).all(), np.min(found, axis=0)


def test_worst_hypervolume_in_batches_of_four() -> None:
    found = np.array([_ratios(c, batch=4) for c in CASES[::8]])
    assert (found.min(axis=0) >= ENOUGH).all(), found.min(axis=0)


def test_twelve_layers_after_25_evaluations() -> None:
    net = TwelveLayers(1)
    problem = net.problem()
    points = search_front(problem, net.evaluate, 25)
    starts = [p.config for p in points] + [c.config for c in exact_front(problem)]
    best = polished(problem, net.evaluate, starts)
    assert len(net.seen) > 500  # the opponent looked at far more
    for share in (0.3, 1.0):  # of the loss of all groups in int4: the search was told of neither corner
        corner = (problem.cost_of((0,) * 12), share * net.evaluate((2,) * 12))
        union = hypervolume([(problem.cost_of(c), net.evaluate(c)) for c in best], corner)
        assert hypervolume([(p.cost, p.loss) for p in points], corner) >= 0.99 * union, share


def test_ends_by_itself_and_spends_the_budget_when_told() -> None:
    case = CASES[0]
    assert len(search_front(case.problem, case.evaluate, 50)) < 30
    assert len(search_front(case.problem, case.evaluate, 50, stop_gain=0.0)) == 50
    few = decreasing(2)
    points = search_front(few, few.loss_of, 50, stop_gain=0.0, never_slower_margin=None)
    assert 5 <= len(points) <= 8, points  # all that can be on a front, of all but the float one


def test_the_search_learns_what_neighbours_do_to_each_other() -> None:
    """Pairs that add up to twice what both lose: the tables alone must fail here, or the case proves nothing."""
    learned, blind = [], []
    for i, case in enumerate(CASES[::8]):
        hard = interacting(case, 2.0, 0.0, i)
        learned.append(_ratios(hard))
        chosen = dp_only(hard)[0][:40]
        points = [(hard.problem.cost_of(c), hard.evaluate(c)) for c in chosen]
        blind.append([hypervolume(points[:n], hard.corner) / hard.best for n in (20, 40)])
    assert (np.min(learned, axis=0) >= ENOUGH).all(), np.min(learned, axis=0)
    assert np.min(blind, axis=0)[1] < ENOUGH[1] < 0.998 < np.mean(learned, axis=0)[1]


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_cheapest_configuration_within_a_loss(share: float) -> None:
    worst = 1.0
    for case in CASES[::9]:
        limit = share * case.evaluate((2,) * 6)
        every = [tuple(c) for c in np.ndindex(*(3,) * 6)]
        best = min(case.problem.cost_of(c) for c in every if case.evaluate(c) <= limit)
        found = [p.cost for p in search_front(case.problem, case.evaluate, 20, max_loss=limit) if p.loss <= limit]
        worst = max(worst, min(found) / best)
    assert worst <= 1.02


def test_constraints_hold_for_everything_that_is_measured() -> None:
    case = CASES[13]
    bits = np.tile([16.0, 8.0, 4.0], (6, 1)) / 6
    problem = case.problem.with_(constraints=(Constraint("effective_bits", bits, 7.0),))
    points = search_front(problem, case.evaluate, 16, stop_gain=0.0)
    assert len(points) == 16
    assert all(sum(bits[0, f] for f in p.config) <= 7.0 for p in points)
    every = [tuple(c) for c in np.ndindex(*(3,) * 6) if sum(bits[0, f] for f in c) <= 7.0]
    corner = (problem.cost_of((0,) * 6), case.evaluate((2,) * 6))
    best = hypervolume([(problem.cost_of(c), case.evaluate(c)) for c in every], corner)
    assert hypervolume([(p.cost, p.loss) for p in points], corner) >= 0.98 * best


@pytest.mark.parametrize("limit", [6.0, 8.0, 10.0])
def test_the_least_loss_within_a_limit_where_a_small_layer_is_slower_in_integers(limit: float) -> None:
    """Never slower is a preference; a limit is none. The truth is every one of the 729 configurations."""
    found = []
    for case in CASES[5::12]:
        cost = np.array(case.problem.cost)
        small = int(cost[:, 0].argmin())
        cost[small, 1:] = cost[small, 0] * np.array([1.02, 1.03])
        bits = np.tile([16.0, 8.0, 4.0], (6, 1)) / 6
        problem = case.problem.with_(cost=cost, constraints=(Constraint("effective_bits", bits, limit),))
        points = search_front(problem, case.evaluate, 40, least_loss=True)
        every = [tuple(c) for c in np.ndindex(*(3,) * 6)]
        best = min(case.evaluate(c) for c in every if not problem.violations(c))
        found.append(min(p.loss for p in points) / best)
    assert np.mean(found) <= 1.01
    assert max(found) <= 1.05


def test_a_model_that_breaks_is_survived() -> None:
    problem = decreasing(6)

    def evaluate(config: tuple[int, ...]) -> float:
        return float("inf") if config[3] == 2 else problem.loss_of(config)

    points = search_front(problem, evaluate, 30, corner=(problem.cost_of((0,) * 6), problem.loss_of((2,) * 6)))
    assert any(p.loss == float("inf") for p in points)
    assert sum(p.loss < float("inf") for p in points) > 5


def test_nothing_to_search() -> None:
    slow = decreasing(3).with_(cost=np.ones((3, 3)), cost_pairs=None)
    assert search_front(slow, slow.loss_of, 10) == []
