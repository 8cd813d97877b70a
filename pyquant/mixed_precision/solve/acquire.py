"""Which configuration to measure next: the one from which most hypervolume is expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from pyquant.mixed_precision.solve.front import exact_front
from pyquant.mixed_precision.solve.predict import Model
from pyquant.mixed_precision.solve.problem import Config, SearchProblem, Table
from pyquant.report.records.pareto import Point, pareto_front

SAMPLES: Final = 8  # fronts drawn from what is possible, besides the likeliest one
# Gauss-Hermite nodes and weights of a normal distribution, exact for polynomials of degree 5.
NODES: Final = np.array([-math.sqrt(3.0), 0.0, math.sqrt(3.0)])
WEIGHTS: Final = np.array([1.0, 4.0, 1.0]) / 6.0
PULL: Final = (0.0, 0.3, 1.0, 3.0, 10.0)  # weights of a constraint's cost against the cost, both in their spans
MAX_POOL: Final = 2000


class Stairs:
    """The front of points below a corner, as steps: cost edges and the loss that is reached between them."""

    def __init__(self, points: Sequence[Point], corner: Point) -> None:
        inside = [p for p in points if p[0] < corner[0] and p[1] < corner[1]]
        front = [inside[i] for i in pareto_front(inside)]
        self.points, self.corner = tuple(front), corner
        self.edges = np.array([-np.inf, *(cost for cost, _ in front), corner[0]])
        self.levels = np.array([corner[1], *(loss for _, loss in front)])

    def gains(self, cost: Table, loss: Table) -> Table:
        """The hypervolume that each point would add. cost [n], loss [n, k] -> [n, k]."""
        widths = np.clip(self.edges[1:] - np.maximum(self.edges[:-1], cost[:, None]), 0.0, None)
        heights = np.clip(self.levels - loss[:, :, None], 0.0, None)
        return np.einsum("ns,nks->nk", widths, heights)

    def adding(self, point: Point) -> Stairs:
        """The stairs with one point more."""
        return Stairs([*self.points, point], self.corner)

    @property
    def volume(self) -> float:
        """The hypervolume of the points themselves."""
        return float(((self.edges[2:] - self.edges[1:-1]) * (self.levels[0] - self.levels[1:])).sum())


class Outlook:
    """The same points below several corners: what a point adds counts as a share of the hypervolume below each."""

    def __init__(self, points: Sequence[Point], corners: Sequence[Point]) -> None:
        self.stairs = tuple(Stairs(points, corner) for corner in corners)

    def gains(self, cost: Table, loss: Table) -> Table:
        """The sum of the shares that each point would add. cost [n], loss [n, k] -> [n, k]."""
        return sum(s.gains(cost, loss) / max(s.volume, 1e-300) for s in self.stairs)  # type: ignore[return-value]

    def adding(self, points: Sequence[Point]) -> Outlook:
        """The outlook with more points."""
        return Outlook([*{p: None for s in self.stairs for p in s.points}, *points], [s.corner for s in self.stairs])

    def share_of(self, points: Sequence[Point]) -> float:
        """The largest share of the hypervolume below a corner that all these points add together."""
        pairs = zip(self.adding(points).stairs, self.stairs, strict=True)
        return max((after.volume - before.volume) / max(before.volume, 1e-300) for after, before in pairs)

    def has(self, point: Point) -> bool:
        """Whether a point is on the front below one of the corners."""
        return any(point in s.points for s in self.stairs)


def candidates(model: Model, rng: np.random.Generator, epsilon: float) -> list[Config]:
    """Configurations on the front that the model thinks likeliest and on some that are possible, in order."""
    candidates: set[Config] = set()
    for problem in (model.refitted(), *(model.sampled(rng) for _ in range(SAMPLES))):
        for pull in PULL if problem.constraints else (0.0,):
            candidates.update(c.config for c in exact_front(_pulled(problem, pull), epsilon))
        for constraint in problem.constraints:  # the least loss for every total of what is limited
            limited = problem.with_(cost=constraint.table, cost_base=constraint.base, cost_pairs=None)
            candidates.update(c.config for c in exact_front(limited, epsilon))
    feasible = sorted(c for c in candidates if not model.problem.violations(c))
    if len(feasible) > MAX_POOL:  # of many groups: an even choice along the costs
        order = np.lexsort((np.arange(len(feasible)), model.problem.costs_of(feasible)))
        feasible = [feasible[order[i]] for i in np.linspace(0, len(feasible) - 1, MAX_POOL).astype(int)]
    return sorted(set(feasible))


def neighbours(problem: SearchProblem, configs: Sequence[Config]) -> list[Config]:
    """Every allowed configuration that differs from one of these in one group, in order."""
    neighbours = {
        (*config[:g], int(f), *config[g + 1 :])
        for config in configs
        for g in range(len(config))
        for f in np.flatnonzero(problem.mask[g])
    }
    return sorted(c for c in neighbours if not problem.violations(c))


def expected_gains(model: Model, stairs: Stairs | Outlook, pool: Sequence[Config]) -> tuple[Table, Table, Table]:
    """-> (expected gain, cost, predicted loss) of each configuration of the pool, float64 [pool]. The gain is that of
    the hypervolume below the stairs' corner, or of its shares in an outlook."""
    costs = model.problem.costs_of(pool)
    mean, deviation = model.predict(pool)
    return stairs.gains(costs, mean[:, None] + deviation[:, None] * NODES) @ WEIGHTS, costs, mean


def likely_savings(model: Model, pool: Sequence[Config], best: float, max_loss: float) -> Table:
    """What each configuration is expected to save against the cost `best`, if it keeps to max_loss. float64 [pool]."""
    costs = model.problem.costs_of(pool)
    mean, deviation = model.predict(pool)
    depth = (max_loss - mean) / np.maximum(deviation, 1e-300)
    chance = np.array([0.5 * math.erfc(-d / math.sqrt(2.0)) for d in depth])
    return np.maximum(best - costs, 0.0) * chance


def likely_improvements(model: Model, pool: Sequence[Config], best: float) -> Table:
    """By how much each configuration is expected to lose less than `best`. float64 [pool]."""
    mean, deviation = model.predict(pool)
    return np.maximum(best - (mean[:, None] + deviation[:, None] * NODES), 0.0) @ WEIGHTS


def _pulled(problem: SearchProblem, pull: float) -> SearchProblem:
    """The costs of the constraints added to the cost, so that the front leads to where the constraints are kept."""
    if pull == 0.0:
        return problem
    cost = np.array(problem.cost)
    for constraint in problem.constraints:
        spans = [max(float(np.ptp(table)), 1e-300) for table in (problem.cost, constraint.table)]
        cost += pull * constraint.table * (spans[0] / spans[1])
    return problem.with_(cost=cost)
