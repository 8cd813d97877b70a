"""The exact Pareto front of a problem's model: a dynamic programme over (group, format of the group before).

Costs and losses are sums of terms of one group and of two neighbours, so that of two beginnings that end in the same
format the one that is worse in both can never be part of a better whole: each state keeps only its own Pareto set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve.problem import Config, SearchProblem, Table


class FrontPoint(NamedTuple):
    """A configuration with its cost and its loss, as a problem's tables predict them."""

    config: Config
    cost: float
    loss: float


@dataclass(frozen=True)
class _States:
    """Beginnings of configurations, format by format of the last group; those of one format by rising cost."""

    cost: Table
    loss: Table
    key: NDArray[np.int64]  # orders them as their formats do
    end: NDArray[np.int64]  # format of the last group
    parent: NDArray[np.int64]  # index into the beginnings of the group before


def exact_front(problem: SearchProblem, epsilon: float = 0.0) -> list[FrontPoint]:
    """Every point of the Pareto front of (cost, loss) as the tables predict them, the cheapest first.

    epsilon  0: exact. Above: beginnings whose costs fall into one cell of a grid are merged, so that every point of the
             exact front has a returned one with no more loss and at most epsilon x (dearest - cheapest) more cost.
             For problems of more than about 20 groups: 0.001.
    Of configurations of equal cost and loss the first in the order of tuples is given (epsilon = 0). Constraints of
    the problem are not looked at. Raises ArgumentError for a negative epsilon.
    Source: docs/search.md 2.

    Example:
        >>> problem = SearchProblem(("a", "b"), ("fp32", "int4"), loss=[[0, 1], [0, 3]], cost=[[8, 2], [8, 2]])
        >>> [c.config for c in exact_front(problem)]
        [(1, 1), (1, 0), (0, 0)]
    """
    if not 0 <= epsilon < 1:
        raise ArgumentError("epsilon", epsilon, "0 (exact) to below 1")
    cell = epsilon * _span(problem) / max(1, len(problem.groups))
    (cost, costs), (loss, losses) = problem.steps("cost"), problem.steps("loss")
    # one beginning a format, which is its key; nothing is before it
    formats = np.flatnonzero(problem.mask[0])
    nothing = np.full(len(formats), -1)
    history = [_States(problem.cost_base + cost[formats], problem.loss_base + loss[formats], formats, formats, nothing)]
    for g in range(1, len(problem.groups)):
        formats = np.flatnonzero(problem.mask[g])
        history.append(_extended(history[-1], costs[g - 1], losses[g - 1], formats, cell))
    last = history[-1]
    return _read_back(history, _needed(last.cost[None], last.loss[None], last.key[None], 0.0)[1])


def _extended(states: _States, cost: Table, loss: Table, formats: NDArray[np.int64], cell: float) -> _States:
    """Every beginning with one group more in each of the formats, without those that another one dominates.

    cost, loss  [formats before, formats]: what the group adds. All formats at once, one a row: searches solve hundreds
                of small problems, whose time is that of the calls of numpy.
    """
    costs = states.cost + cost[states.end].T[formats]
    losses = states.loss + loss[states.end].T[formats]
    keys = states.key * cost.shape[1] + formats[:, None]
    kept = row, parent = _needed(costs, losses, keys, cell)
    return _States(costs[kept], losses[kept], _dense(keys[kept]), formats[row], parent)


def _needed(cost: Table, loss: Table, key: NDArray[np.int64], cell: float) -> tuple[NDArray[np.int64], ...]:
    """Rows and columns of the Pareto set of each row, by rising cost; with a cell: of one point for each cell of costs
    at most."""
    cells = cost if cell == 0 else np.floor(cost / cell)
    order = np.lexsort((key, loss, cells) if cell == 0 else (key, cost, loss, cells))
    losses = np.take_along_axis(loss, order, axis=1)
    best = np.minimum.accumulate(losses, axis=1)
    needed = np.ones(losses.shape, dtype=bool)
    needed[:, 1:] = losses[:, 1:] < best[:, :-1]
    rows, at = needed.nonzero()
    return rows, order[rows, at]


def _dense(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2, ... in the order of keys, none of which is there twice: they would outgrow 64 bits otherwise."""
    dense = np.empty_like(keys)
    dense[np.argsort(keys)] = np.arange(len(keys))
    return dense


def _read_back(history: list[_States], chosen: NDArray[np.int64]) -> list[FrontPoint]:
    """The configurations of some of the last group's states, format by format from the end."""
    last, index = history[-1], chosen
    configs = np.empty((len(chosen), len(history)), dtype=np.int64)
    for g in range(len(history) - 1, -1, -1):
        configs[:, g] = history[g].end[index]
        index = history[g].parent[index]
    rows = zip(configs.tolist(), last.cost[chosen].tolist(), last.loss[chosen].tolist(), strict=True)
    return [FrontPoint(tuple(c), a, b) for c, a, b in rows]


def _span(problem: SearchProblem) -> float:
    """At least the cheapest and at most the dearest: a lower bound of the span of costs (never 0 of a real problem)."""
    rows = [row[ok] for row, ok in zip(problem.cost, problem.mask, strict=True)]
    return float(sum(row.max() - row.min() for row in rows))
