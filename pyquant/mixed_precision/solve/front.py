"""The exact Pareto front of a problem's model: a dynamic programme over (group, format of the group before).

Costs and losses are sums of terms of one group and of two neighbours, so that of two beginnings that end in the same
format the one that is worse in both can never be part of a better whole: each state keeps only its own Pareto set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Beginnings of configurations that end in one format, sorted by cost; `key` orders them as their formats do."""

    cost: Table
    loss: Table
    key: NDArray[np.int64]
    parent: NDArray[np.int64]  # index into the beginnings of the group before, all states in a row

    def take(self, index: NDArray[np.int64]) -> _States:
        return _States(self.cost[index], self.loss[index], self.key[index], self.parent[index])

    @staticmethod
    def joined(states: Sequence[_States]) -> _States:
        fields = ("cost", "loss", "key", "parent")
        return _States(*(np.concatenate([getattr(s, name) for s in states]) for name in fields))


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
    none, formats = np.empty(0, dtype=np.int64), range(len(problem.formats))
    # one beginning a format, which is its key; nothing is before it
    first = _States(problem.cost_base + cost, problem.loss_base + loss, np.array(formats), np.full(len(formats), -1))
    history = [[first.take(np.array([f]) if problem.mask[0, f] else none) for f in formats]]
    for g in range(1, len(problem.groups)):
        states = [
            _extend(history[-1], costs[g - 1][:, f], losses[g - 1][:, f], f, cell)
            if problem.mask[g, f]
            else first.take(none)
            for f in formats
        ]
        history.append(_with_dense_keys(states))
    return _read_back(history, _needed(_States.joined(history[-1]), 0.0))


def _extend(states: list[_States], cost: Table, loss: Table, f: int, cell: float) -> _States:
    """Every partial configuration extended by format f, without the dominated ones."""
    starts = np.cumsum([0, *(len(s.cost) for s in states)])
    extended = _States(
        np.concatenate([s.cost + cost[p] for p, s in enumerate(states)]),
        np.concatenate([s.loss + loss[p] for p, s in enumerate(states)]),
        np.concatenate([s.key * len(states) + f for s in states]),
        np.arange(starts[-1], dtype=np.int64),
    )
    return extended.take(_needed(extended, cell))


def _needed(states: _States, cell: float) -> NDArray[np.int64]:
    """Indices of the Pareto set, by rising cost; with a cell: of one point for each cell of costs at most."""
    cells = states.cost if cell == 0 else np.floor(states.cost / cell)
    order = np.lexsort((states.key, states.loss, cells) if cell == 0 else (states.key, states.cost, states.loss, cells))
    loss = states.loss[order]
    best = np.concatenate([[np.inf], np.minimum.accumulate(loss)[:-1]])
    return order[loss < best]


def _with_dense_keys(states: list[_States]) -> list[_States]:
    """Keys 0, 1, 2, ... in the same order: they would outgrow 64 bits otherwise."""
    keys = np.unique(_States.joined(states).key, return_inverse=True)[1].astype(np.int64)
    parts = np.split(keys, np.cumsum([len(s.key) for s in states])[:-1])
    return [replace(s, key=part) for s, part in zip(states, parts, strict=True)]


def _read_back(history: list[list[_States]], chosen: NDArray[np.int64]) -> list[FrontPoint]:
    """The configurations of some of the last group's states, format by format from the end."""
    last, index = _States.joined(history[-1]).take(chosen), chosen
    configs = np.empty((len(chosen), len(history)), dtype=np.int64)
    for g in range(len(history) - 1, -1, -1):
        ends = np.cumsum([len(s.cost) for s in history[g]])
        configs[:, g] = np.searchsorted(ends, index, side="right")
        index = _States.joined(history[g]).parent[index]
    rows = zip(configs.tolist(), last.cost.tolist(), last.loss.tolist(), strict=True)
    return [FrontPoint(tuple(c), a, b) for c, a, b in rows]


def _span(problem: SearchProblem) -> float:
    """At least the cheapest and at most the dearest: a lower bound of the span of costs (never 0 of a real problem)."""
    rows = [row[ok] for row, ok in zip(problem.cost, problem.mask, strict=True)]
    return float(sum(row.max() - row.min() for row in rows))
