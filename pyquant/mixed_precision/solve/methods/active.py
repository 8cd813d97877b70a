"""The method that wins: the exact front of a model, a measurement where it promises most, a refit, and again."""

from __future__ import annotations

from typing import Final

import numpy as np

from pyquant.mixed_precision.solve.acquire import Stairs, candidates, expected_gains, likely_savings, neighbours
from pyquant.mixed_precision.solve.predict import Model
from pyquant.mixed_precision.solve.problem import Config, Table
from pyquant.mixed_precision.solve.solver import Search, search_algorithm

PATIENCE: Final = 4  # choices in a row that promised too little, before the search believes it


@search_algorithm("dp")
def dp(search: Search) -> None:
    """Uniform configurations, then the largest expected gain of hypervolume, refitted after every measurement.

    With max_loss every second choice is instead the one that is expected to save most cost within it. Ends when four
    choices in a row found less than stop_gain of the hypervolume in everything that is still expected.
    Source: docs/search.md 3.
    """
    search.measure(search.start)
    if search.problem.num_configs == 1:  # everything that might have paid was dropped
        return
    step = idle = 0
    while idle < PATIENCE or search.stop_gain == 0:
        finite = [(c, loss) for c, loss in search.losses.items() if loss < np.inf]
        model = Model(search.problem, finite)
        stairs = Stairs([(search.problem.cost_of(c), loss) for c, loss in finite], search.corner)
        pool = _pool(search, model, stairs)
        if not pool:
            return
        chosen, predicted, is_worth = _choose(search, model, stairs, pool, by_savings=step % 2 == 1)
        idle = 0 if is_worth else idle + 1
        if idle < PATIENCE or search.stop_gain == 0:
            search.measure(chosen, predicted)
        step += 1


def _pool(search: Search, model: Model, stairs: Stairs) -> list[Config]:
    """New configurations of possible fronts; where all of them are measured, those one change away from the front."""
    rng = np.random.default_rng([search.seed, len(search.losses)])
    done = search.losses
    pool = [c for c in candidates(model, rng, search.epsilon) if c not in done]
    if pool:
        return pool
    best = [c for c, loss in done.items() if (search.problem.cost_of(c), loss) in stairs.points]
    return [c for c in neighbours(search.problem, best) if c not in done]


def _choose(
    search: Search, model: Model, stairs: Stairs, pool: list[Config], by_savings: bool
) -> tuple[list[Config], list[float], bool]:
    """-> (up to `batch` configurations, the losses that are expected of them, whether they are worth while)."""
    chosen: list[Config] = []
    expected: list[float] = []
    is_worth = False
    while pool and len(chosen) < search.batch:
        gains, costs, mean = expected_gains(model, stairs, pool)
        saved = _savings(search, model, pool) if not chosen else np.zeros(len(pool))
        if not chosen:
            is_worth = bool(saved.any()) or _is_worth(search, stairs, gains, costs, mean)
        best = int(np.argmax(saved if by_savings and saved.any() else gains))
        chosen.append(pool[best])
        expected.append(float(mean[best]))
        stairs = stairs.adding((float(costs[best]), float(mean[best])))
        pool = pool[:best] + pool[best + 1 :]
    return chosen, expected, is_worth


def _is_worth(search: Search, stairs: Stairs, gains: Table, costs: Table, mean: Table) -> bool:
    """Whether the best choice, or all that is predicted together, adds enough: thirty small gains are a large one."""
    together = Stairs([*stairs.points, *zip(costs.tolist(), mean.tolist(), strict=True)], stairs.corner)
    most = max(float(gains.max()), together.volume - stairs.volume)
    return most > search.stop_gain * stairs.volume


def _savings(search: Search, model: Model, pool: list[Config]) -> Table:
    """Cost that is expected to be saved within max_loss; zeros without one, or where hardly anything is to be had."""
    if search.max_loss is None:
        return np.zeros(len(pool))
    problem = search.problem
    costs = [problem.cost_of(c) for c, y in search.losses.items() if y <= search.max_loss and not problem.violations(c)]
    best = min(costs, default=search.corner[0])
    saved = likely_savings(model, pool, best, search.max_loss)
    return saved if saved.max() > search.stop_gain * best else np.zeros(len(pool))
