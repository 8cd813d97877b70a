"""Greedy: one group after the other, the one first that saves most for what it loses."""

from __future__ import annotations

import numpy as np

from pyquant.mixed_precision.solve.problem import Config, SearchProblem
from pyquant.mixed_precision.solve.solver import Search, search_algorithm


@search_algorithm("greedy")
def greedy(search: Search) -> None:
    """Lower one group at a time along the path of the best saving per predicted loss.

    Without max_loss the whole path is measured, one configuration per step. With it, a step is taken back when what is
    measured loses more, and that group is not lowered further: at most groups x (formats - 1) evaluations.
    Source: C. Schaefer et al., arXiv 2302.01382 (a greedy search guided by a sensitivity).
    """
    problem = search.problem
    config = problem.uniform(0)
    if not problem.violations(config):
        search.measure([config])
    if search.max_loss is None:
        path = []
        while (lower := _next(problem, config, set())) is not None:
            config = lower
            path.append(config)
        search.measure_all(path)
        return
    closed: set[int] = set()
    while (following := _next(problem, config, closed)) is not None:
        group = next(g for g, (a, b) in enumerate(zip(config, following, strict=True)) if a != b)
        # a configuration that still violates a constraint (too large) is only an intermediate step
        if problem.violations(following) or search.measure([following])[0] <= search.max_loss:
            config = following
        else:
            closed.add(group)


def _next(problem: SearchProblem, config: Config, closed: set[int]) -> Config | None:
    """The cheaper configuration that is one group away and saves most for its loss; None: none is cheaper."""
    cost, loss = problem.cost_of(config), problem.loss_of(config)
    best: tuple[float, Config] | None = None
    for g in range(len(config)):
        for f in np.flatnonzero(problem.mask[g]).tolist():
            following = (*config[:g], f, *config[g + 1 :])
            saved = cost - problem.cost_of(following)
            if g in closed or saved <= 0 or (problem.violations(following) and not problem.violations(config)):
                continue
            lost = max(problem.loss_of(following) - loss, 1e-300)
            if best is None or saved / lost > best[0]:
                best = saved / lost, following
    return None if best is None else best[1]
