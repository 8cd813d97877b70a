"""Bisection: groups in the order of their sensitivity, and the number of them that can be lowered, found by halving."""

from __future__ import annotations

from typing import Final

import numpy as np

from pyquant.mixed_precision.solve.problem import Config
from pyquant.mixed_precision.solve.solver import Search, search_algorithm

LIMITS: Final = 8  # loss limits to bisect for where the caller gives none


@search_algorithm("bisection")
def bisection(search: Search) -> None:
    """Lower the least sensitive groups to the second format as far as max_loss lasts, then these to the third, ...

    Any of the sensitivity metrics can be the problem's loss table; only its order in each format matters. About
    log2(groups) evaluations for each format. Without max_loss: for eight limits up to the corner, so that there is a
    front. Monotone only as far as the order is right, so the best that was measured counts, not the last.
    Source: C. Schaefer et al., arXiv 2302.01382.
    """
    if not search.problem.violations(search.problem.uniform(0)):
        search.measure([search.problem.uniform(0)])
    if search.max_loss is not None:
        _bisect(search, search.max_loss)
        return
    base, worst = search.problem.loss_base, search.corners[-1][1]
    for i in range(LIMITS, 0, -1):
        _bisect(search, base + (worst - base) * i / LIMITS)


def _bisect(search: Search, max_loss: float) -> None:
    problem = search.problem
    config = problem.uniform(0)
    for f in range(1, len(problem.formats)):
        able = [g for g in range(len(config)) if problem.mask[g, f] and problem.cost[g, f] < problem.cost[g, config[g]]]
        # only groups that accepted the previous format may take this one
        able = [g for g in able if config[g] == f - 1 or not problem.mask[g, config[g] + 1 : f].any()]
        able.sort(key=lambda g: (problem.loss[g, f], g))
        accepted, refused = 0, len(able) + 1  # numbers of least sensitive groups that can and cannot be lowered
        while refused - accepted > 1:
            middle = (accepted + refused) // 2
            lowered = _lowered(config, able[:middle], f)
            # a configuration that still violates a constraint (too large) has to be lowered further
            is_kept = bool(problem.violations(lowered)) or search.measure([lowered])[0] <= max_loss
            accepted, refused = (middle, refused) if is_kept else (accepted, middle)
        config = _lowered(config, able[:accepted], f)


def _lowered(config: Config, groups: list[int], f: int) -> Config:
    lowered = np.array(config)
    lowered[groups] = f
    return tuple(lowered.tolist())
