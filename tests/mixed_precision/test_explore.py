"""A limit on a task's metric: the cheapest configuration within it, against every one of 729, and of a model's 81."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from searched import FORMATS, batches, net, search
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.mixed_precision.accuracy_limit import loss_at_limit
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.explore import Drops, explore
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs
from pyquant.mixed_precision.solve import Config, Constraint, Measured, search_front

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.search_cases import Case, table_cases

START = (0,) * 6
EVERY = list(itertools.product(range(3), repeat=6))
CASES = list(table_cases())


def _explored(case: Case, limit: float, noise: float = 0.0, evaluations: int = 12) -> tuple[float, float, int]:
    """-> (cost found, least cost of all that hold the limit, losses measured), where the drop is the loss."""
    measured: list[Config] = []

    def evaluate(config: Config) -> float:
        measured.append(config)
        return case.evaluate(config)

    def drop_of(config: Config) -> float:
        asked.append(config)
        return case.evaluate(config) * (1 + noise * float(np.random.default_rng(config).standard_normal()))

    def front(budget: int, known: Mapping[Config, float], max_loss: float | None) -> list[Measured]:
        return search_front(case.problem, evaluate, budget, known=known, max_loss=max_loss)

    asked: list[Config] = []
    singles = {tuple(f if i == g else 0 for i in range(6)): case.problem.loss[g, f] for g in range(6) for f in (1, 2)}
    drops = Drops(drop_of, limit, evaluations, START)
    losses, within = explore(case.problem, front, {START: 0.0, **singles}, 40, None, drops)
    assert len(measured) == len(set(measured)) <= 40
    assert len(asked) == len(set(asked)) <= evaluations
    assert set(measured) <= set(losses)
    assert within[0] == START
    assert all(drops.known[c] <= limit for c in within)
    cost = case.problem.cost_of
    return min(map(cost, within)), min(cost(c) for c in EVERY if case.evaluate(c) <= limit), len(measured)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_the_cheapest_within_a_tolerance_is_within_a_percent(share: float) -> None:
    found = [
        _explored(case, share * case.evaluate((2,) * 6)) for case in CASES[2::20]
    ]  # python -m bench.search_methods: all of them
    dearer = [cost / best for cost, best, _ in found]
    assert max(dearer) <= 1.01, dearer


def test_a_tolerance_that_allows_everything_gives_the_cheapest_of_all() -> None:
    case = CASES[0]
    cost, best, _ = _explored(case, 2 * case.evaluate((2,) * 6))
    assert cost == best == case.problem.cost_of((2,) * 6)


def test_a_tolerance_of_nothing_gives_the_float_model_or_what_loses_nothing() -> None:
    cost, best, _ = _explored(CASES[0], 0.0)
    assert cost == best


@pytest.mark.parametrize("evaluations", [1, 3, 4])
def test_few_evaluations_and_noisy_ones_find_something(evaluations: int) -> None:
    case = CASES[7]
    cost, best, _ = _explored(case, 0.5 * case.evaluate((2,) * 6), evaluations=evaluations, noise=0.1)
    assert cost < case.problem.cost_of(START)
    assert best > 0


def test_limits_of_the_problem_hold_in_every_round() -> None:
    case = CASES[3]
    bits = np.tile([16.0, 8.0, 4.0], (6, 1)) / 6
    problem = case.problem.with_(constraints=(Constraint("effective_bits", bits, 9.0),))
    drops = Drops(case.evaluate, 0.6 * case.evaluate((2,) * 6), 12, START)

    def front(budget: int, known: Mapping[Config, float], max_loss: float | None) -> list[Measured]:
        return search_front(problem, case.evaluate, budget, known=known, max_loss=max_loss)

    _, within = explore(problem, front, {START: 0.0}, 40, None, drops)
    assert within
    assert not any(problem.violations(c) for c in within)  # not even the float model is left


def test_the_loss_at_a_limit() -> None:
    assert loss_at_limit([], 0.1) is None
    assert loss_at_limit([(0.0, 0.0), (1.0, 0.05)], 0.1) is None  # all hold it
    assert loss_at_limit([(1.0, 0.5)], 0.1) is None  # none does
    assert loss_at_limit([(2.0, 0.3), (0.0, 0.0), (1.0, 0.1)], 0.2) == pytest.approx(1.5)
    assert loss_at_limit([(0.0, 0.0), (1.0, 0.5)], 0.0) == 0.25  # a step may go on behind the last point that holds
    assert loss_at_limit([(0.0, 0.0), (1.0, 0.2), (2.0, 0.0), (3.0, 1.0)], 0.1) == pytest.approx(2.25)  # by the trend


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_a_search_with_a_tolerance_finds_the_cheapest_of_all_configurations(share: float) -> None:
    model, data = net(), batches()
    truth = [model(x).log_softmax(-1) for x in data]

    def minus_kl(candidate: nn.Module) -> float:
        def of(x: Tensor, log_p: Tensor) -> float:
            return F.kl_div(candidate(x).log_softmax(-1), log_p, log_target=True, reduction="batchmean").item()

        with torch.no_grad():
            return -float(np.mean([of(x, p) for x, p in zip(data, truth, strict=True)]))

    switchable = SwitchableModel(model, FORMATS, data, num_batches=4)
    loss = LossOfOutputs(switchable, "kl")
    sizes = switchable.group_bytes()
    every = {c: loss(c) for c in itertools.product(range(3), repeat=4)}
    tolerance = share * every[2, 2, 2, 2]
    plan = search(model, eval_fn=minus_kl, max_drop=tolerance)
    size = {c: switchable.other_bytes() + sum(sizes[g][f] for g, f in enumerate(c)) for c in every}
    best = min(size[c] for c, lost in every.items() if lost <= tolerance * (1 - 1e-6))
    assert plan.record.plan.size_bytes <= 1.01 * best
    assert plan.record.plan.drop is not None
    assert plan.record.plan.drop <= tolerance


def test_the_corner_is_an_option() -> None:
    """Nothing beyond it is proposed, once the uniform configurations are measured."""
    near, far = (search(corner_share=share, max_drop=1.0, budget=30) for share in (0.05, 1.0))
    lowest = max(p.loss for p in far.record.points)

    def beyond(plan: object) -> int:
        return sum(p.loss > 0.1 * lowest for p in plan.record.points)  # type: ignore[attr-defined]

    assert beyond(near) < beyond(far)
