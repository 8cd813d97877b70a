"""The method that wins: the exact front of a model, a measurement where it promises most, a refit, and again."""

from __future__ import annotations

from typing import Final

import numpy as np

from pyquant.mixed_precision.solve.acquire import (
    Outlook,
    candidates,
    expected_gains,
    likely_improvements,
    likely_savings,
    neighbours,
)
from pyquant.mixed_precision.solve.predict import Model
from pyquant.mixed_precision.solve.problem import Config, Table
from pyquant.mixed_precision.solve.solver import Search, search_algorithm

PATIENCE: Final = 4  # choices in a row that promised too little, before the search believes it
SMALL_SAVING: Final = 0.1  # of stop_gain: one small chance of a large saving is what is left at the end
SMALL_LOSS: Final = 0.01  # of the least loss: improvements below are beyond what data tell


@search_algorithm("dp")
def dp(search: Search) -> None:
    """Uniform configurations, then the largest expected gain of hypervolume, refitted after every measurement.

    With max_loss every second choice is instead the one that is expected to save most cost within it; with least_loss
    every one that is expected to lose less than the best so far. Ends when four choices in a row found less than
    stop_gain of the hypervolume in everything that is still expected.
    Source: docs/search.md 3.
    """
    search.measure(search.start)
    if search.problem.num_configs == 1:  # everything that might have paid was dropped
        return
    step = idle = 0
    while idle < PATIENCE or search.stop_gain == 0:
        finite = [(c, loss) for c, loss in search.losses.items() if loss < np.inf]
        model = Model(search.problem, finite)
        kept = [(search.problem.cost_of(c), loss) for c, loss in finite if not search.problem.violations(c)]
        outlook = Outlook(kept, search.corners)
        pool = _pool(search, model, outlook)
        if not pool:
            return
        chosen, predicted, is_worth = _choose(search, model, outlook, pool, by_goal=search.least_loss or step % 2 == 1)
        idle = 0 if is_worth else idle + 1
        if idle < PATIENCE or search.stop_gain == 0:
            search.measure(chosen, predicted)
        step += 1


def _pool(search: Search, model: Model, outlook: Outlook) -> list[Config]:
    """New configurations of possible fronts; where all of them are measured, those one change away from the front."""
    rng = np.random.default_rng([search.seed, len(search.losses)])
    done = search.losses
    pool = [c for c in candidates(model, rng, search.epsilon) if c not in done]
    if pool:
        return pool
    best = [c for c, loss in done.items() if outlook.has((search.problem.cost_of(c), loss))]
    return [c for c in neighbours(search.problem, best) if c not in done]


def _choose(
    search: Search, model: Model, outlook: Outlook, pool: list[Config], by_goal: bool
) -> tuple[list[Config], list[float], bool]:
    """-> (up to `batch` configurations, the losses that are expected of them, whether they are worth while)."""
    chosen: list[Config] = []
    expected: list[float] = []
    is_worth = False
    while pool and len(chosen) < search.batch:
        gains, costs, mean = expected_gains(model, outlook, pool)
        nearer = _nearer_the_goal(search, model, pool) if not chosen else np.zeros(len(pool))
        if not chosen:
            together = outlook.share_of(list(zip(costs.tolist(), mean.tolist(), strict=True)))
            # thirty small gains are a large one
            is_worth = bool(nearer.any()) or max(float(gains.max()), together) > search.stop_gain
        best = int(np.argmax(nearer if by_goal and nearer.any() else gains))
        chosen.append(pool[best])
        expected.append(float(mean[best]))
        outlook = outlook.adding([(float(costs[best]), float(mean[best]))])
        pool = pool[:best] + pool[best + 1 :]
    return chosen, expected, is_worth


def _nearer_the_goal(search: Search, model: Model, pool: list[Config]) -> Table:
    """Cost that is expected to be saved within max_loss, or loss within the constraints; zeros where neither is asked
    for, or hardly anything is to be had."""
    problem, limit = search.problem, search.max_loss
    kept = {c: loss for c, loss in search.losses.items() if not problem.violations(c)}
    if limit is not None:
        costs = [problem.cost_of(c) for c, loss in kept.items() if loss <= limit]
        best = min(costs, default=search.corners[0][0])
        nearer, enough = likely_savings(model, pool, best, limit), SMALL_SAVING * search.stop_gain * best
    elif search.least_loss:
        best = min(kept.values(), default=search.corners[-1][1])
        nearer, enough = likely_improvements(model, pool, best), SMALL_LOSS * (best - problem.loss_base)
    else:
        return np.zeros(len(pool))
    return nearer if nearer.max() > enough else np.zeros(len(pool))
