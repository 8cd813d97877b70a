"""Problems for tests of the search: random tables with ties, and brute force over them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pyquant.mixed_precision.solve import Config, SearchProblem
from pyquant.report.records.pareto import pareto_front

FORMATS = ("fp32", "int8", "int4")


def random_problem(seed: int, groups: int = 6, top: int = 6, pairs: bool = True, allow: float = 0.85) -> SearchProblem:
    """Small integers, so that sums tie and are exact; some options are not allowed; losses of pairs may be negative."""
    rng = np.random.default_rng(seed)
    shape, between = (groups, 3), (groups - 1, 3, 3)
    mask = rng.random(shape) < allow
    mask[:, 0] |= ~mask.any(axis=1)
    more: dict[str, Any] = {}
    if pairs:
        more = {"cost_pairs": rng.integers(0, 4, between), "loss_pairs": rng.integers(-2, 3, between)}
    return SearchProblem(
        tuple(f"g{i}" for i in range(groups)),
        FORMATS,
        rng.integers(0, top, shape),
        rng.integers(0, top, shape),
        cost_base=7.0,
        loss_base=1.0,
        allowed=mask,
        **more,
    )


def every_config(problem: SearchProblem) -> list[Config]:
    """All allowed configurations, in the order of tuples."""
    return list(itertools.product(*(np.flatnonzero(row).tolist() for row in problem.mask)))


def brute_front(problem: SearchProblem) -> list[tuple[Config, float, float]]:
    """The front from every configuration; sums are written out here once more, on purpose."""
    configs = every_config(problem)
    points = []
    for c in configs:
        totals = []
        for base, table, pairs in (
            (problem.cost_base, problem.cost, problem.cost_pairs),
            (problem.loss_base, problem.loss, problem.loss_pairs),
        ):
            total = base + sum(table[g, f] for g, f in enumerate(c))
            if pairs is not None:
                total += sum(pairs[g, a, b] for g, (a, b) in enumerate(itertools.pairwise(c)))
            totals.append(float(total))
        points.append((totals[0], totals[1]))
    return [(configs[i], *points[i]) for i in pareto_front(points)]


def decreasing(groups: int, seed: int = 0) -> SearchProblem:
    """Floats as real tables have them: cheaper formats lose more, conversions cost."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal(groups))
    loss = np.stack([0 * scale, 0.01 * scale, scale * rng.uniform(0.5, 2.0, groups)], axis=1)
    cost = rng.uniform(1, 10, groups)[:, None] * np.array([1.0, 0.55, 0.3])
    pairs = np.broadcast_to(0.2 * (1 - np.eye(3)), (groups - 1, 3, 3))
    return SearchProblem(tuple(f"g{i}" for i in range(groups)), FORMATS, loss, cost, cost_pairs=pairs)
