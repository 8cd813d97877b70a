"""Search problems with the truth at hand: measured tables of 729 configurations, and a net of twelve layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pyquant.mixed_precision.explore import Drops, explore
from pyquant.mixed_precision.solve import Config, Measured, SearchProblem, search_front
from pyquant.report.records.pareto import Point, hypervolume

TABLES: Final = (
    Path(__file__).resolve().parents[1] / "tests/mixed_precision/solve/fixtures/tables.npz"
)  # by bench.search_tables
FORMATS: Final = ("fp32", "int8", "int4")
BITS: Final = (16, 8, 4)
CORNER_SHARE: Final = 0.3  # of the loss of all groups in int4

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Case:
    """A problem, the measured loss of every configuration that is asked for, and the hypervolume of the best front."""

    name: str
    problem: SearchProblem
    evaluate: Callable[[Config], float]
    corner: Point
    best: float

    def ratio(self, points: list[Measured]) -> float:
        """Hypervolume of measured points relative to the best front, with the losses as they are."""
        return hypervolume([(p.cost, self.evaluate(p.config)) for p in points], self.corner) / self.best


def table_cases(path: Path = TABLES) -> Iterator[Case]:
    """Model x seed x kind of int4 x kind of cost: losses of one group at a time are the problem's table."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    for name in sorted(n for n in arrays if n.count(".") == 2):
        table = arrays[name].astype(np.float64)
        loss = np.zeros((table.ndim, table.shape[0]))
        for g, f in itertools.product(range(loss.shape[0]), range(1, loss.shape[1])):
            loss[g, f] = table[tuple(f if i == g else 0 for i in range(table.ndim))]
        model = name.split(".")[0]
        groups = tuple(f"group{i}" for i in range(table.ndim))
        for cost in ("bops", "latency"):
            pairs = arrays[f"{model}.pairs"] if cost == "latency" else None
            problem = SearchProblem(groups, FORMATS, loss, arrays[f"{model}.{cost}"], cost_pairs=pairs)
            corner = (problem.cost_of(problem.uniform(0)), CORNER_SHARE * float(table[(2,) * table.ndim]))
            every = itertools.product(range(table.shape[0]), repeat=table.ndim)
            best = hypervolume([(problem.cost_of(c), float(table[c])) for c in every], corner)
            yield Case(f"{name}.{cost}", problem, lambda c, t=table: float(t[c]), corner, best)


def with_whole_front(case: Case) -> Case:
    """The same with the corner at all that the lowest uniform configuration loses, where the cheap end counts."""
    problem = case.problem
    groups, formats = problem.loss.shape
    corner = (case.corner[0], case.evaluate((formats - 1,) * groups))
    every = itertools.product(range(formats), repeat=groups)
    best = hypervolume([(problem.cost_of(c), case.evaluate(c)) for c in every], corner)
    return Case(f"{case.name}.whole", problem, case.evaluate, corner, best)


def excess_within(case: Case, share: float, budget: int, evaluations: int) -> float:
    """By which factor the cheapest configuration that a search with a tolerance finds is dearer than that of all.

    share  of what the lowest uniform configuration loses: the tolerance, of a task whose drop is the loss.
    """
    problem = case.problem
    groups, formats = problem.loss.shape
    start, limit = (0,) * groups, share * case.evaluate((formats - 1,) * groups)
    single = [(g, f) for g in range(groups) for f in range(1, formats)]
    known = {tuple(f if i == g else 0 for i in range(groups)): float(problem.loss[g, f]) for g, f in single}

    def front(budget: int, known: Mapping[Config, float], max_loss: float | None) -> list[Measured]:
        return search_front(problem, case.evaluate, budget, known=known, max_loss=max_loss)

    drops = Drops(case.evaluate, limit, evaluations, start)
    _, within = explore(problem, front, {start: 0.0, **known}, budget, None, drops)
    every = itertools.product(range(formats), repeat=groups)
    least = min(problem.cost_of(c) for c in every if case.evaluate(c) <= limit)
    return min(problem.cost_of(c) for c in within) / least


def interacting(case: Case, adjacent: float, far: float, seed: int) -> Case:
    """The same costs and single losses, and made-up losses of pairs of groups beyond the sum: the hard case.

    adjacent, far  the largest share, of the geometric mean of both losses, that neighbours and other pairs add.
    """
    problem, rng = case.problem, np.random.default_rng(seed)
    groups, formats = problem.loss.shape
    pairs = {}
    for g, h in itertools.combinations(range(groups), 2):
        share = adjacent if h == g + 1 else far
        mean = np.sqrt(np.outer(problem.loss[g], problem.loss[h]))
        pairs[g, h] = mean * rng.uniform(-0.6 * share, share, (formats, formats))
    every = list(itertools.product(range(formats), repeat=groups))
    table = {}
    for c in every:
        alone = problem.loss_of(c)
        table[c] = max(alone + sum(float(pair[c[g], c[h]]) for (g, h), pair in pairs.items()), 0.2 * alone)
    corner = (case.corner[0], CORNER_SHARE * table[(formats - 1,) * groups])
    best = hypervolume([(problem.cost_of(c), table[c]) for c in every], corner)
    return Case(f"{case.name}.interacting", problem, table.__getitem__, corner, best)


class TwelveLayers:
    """A residual net of twelve Linears with drawn weights; some are heavy-tailed, so that they differ in sensitivity.

    evaluate(config) is KL(float | quantised) per row. Formats: weights per output channel, inputs per tensor with the
    range of the float net, both rounded to 8 or 4 bits.
    """

    ROWS, WIDTH, CLASSES = 192, 48, 16

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        hidden = [32, 96, 64, 160, 48, 128]
        self.weights = []
        for h in hidden:
            for k, n in ((self.WIDTH, h), (h, self.WIDTH)):
                tail = np.exp(rng.uniform(0.0, 1.2) * rng.standard_normal((n, k)))
                w = rng.standard_normal((n, k)) * tail
                self.weights.append(w / np.sqrt((w**2).sum(axis=1, keepdims=True)) * rng.uniform(0.6, 1.4))
        self.head = rng.standard_normal((self.CLASSES, self.WIDTH)) / np.sqrt(self.WIDTH) * 2
        self.x = rng.standard_normal((self.ROWS, self.WIDTH)) * np.exp(0.5 * rng.standard_normal(self.WIDTH))
        self.quantised = [[w, rounded(w, 8, axis=1), rounded(w, 4, axis=1)] for w in self.weights]
        self.ranges: list[float] = []
        self.float_log = self._forward((0,) * 12, watch=True)
        self.seen: dict[Config, float] = {}

    def evaluate(self, config: Config) -> float:
        """The loss of a configuration; each is computed once."""
        if config not in self.seen:
            found = self._forward(config)
            self.seen[config] = float((np.exp(self.float_log) * (self.float_log - found)).sum(axis=1).mean())
        return self.seen[config]

    def problem(self) -> SearchProblem:
        """Costs are bit operations and conversions where formats meet; losses those of one layer at a time."""
        alone = [[tuple(f if i == g else 0 for i in range(12)) for f in range(3)] for g in range(12)]
        loss = [[self.evaluate(c) for c in row] for row in alone]
        cost = np.array([[w.size * b * b / 256 for b in BITS] for w in self.weights])
        pairs = np.zeros((11, 3, 3))
        for g, a, b in itertools.product(range(11), range(3), range(3)):
            pairs[g, a, b] = 0.0 if a == b else 4.0 * self.weights[g].shape[0]
        groups = tuple(f"layer{i}" for i in range(12))
        return SearchProblem(groups, FORMATS, np.maximum(loss, 0.0), cost, cost_pairs=pairs)

    def _forward(self, config: Config, watch: bool = False) -> Array:
        x = self.x
        for block in range(6):
            y = np.maximum(self._linear(2 * block, x / np.sqrt((x**2).mean(axis=1, keepdims=True)), config, watch), 0.0)
            x = x + self._linear(2 * block + 1, y, config, watch)
        logits = x @ self.head.T
        logits = logits - logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def _linear(self, i: int, x: Array, config: Config, watch: bool) -> Array:
        if watch:
            self.ranges.append(float(np.quantile(np.abs(x), 0.999)))
        f = config[i]
        return (x if f == 0 else rounded(x, BITS[f], amax=self.ranges[i])) @ self.quantised[i][f].T


def rounded(x: Array, bits: int, axis: int | None = None, amax: float | None = None) -> Array:
    """x on the grid of signed integers, with one scale for each row (axis=1) or one for all."""
    limit = 2 ** (bits - 1) - 1
    scale = (np.abs(x).max(axis=axis, keepdims=True) if amax is None else amax) / limit
    return np.clip(np.round(x / scale), -limit, limit) * scale


def polished(case_problem: SearchProblem, evaluate: Callable[[Config], float], configs: list[Config]) -> list[Config]:
    """The front of configurations after a local search: every change of one layer of every front point, until nothing
    new is found. An opponent that knows nothing of models."""
    from pyquant.mixed_precision.solve.acquire import neighbours
    from pyquant.report.records.pareto import pareto_front

    known = {c: (case_problem.cost_of(c), evaluate(c)) for c in configs}
    while True:
        names = list(known)
        front = [names[i] for i in pareto_front([known[c] for c in names])]
        new = [c for c in neighbours(case_problem, front) if c not in known]
        if not new:
            return front
        known.update({c: (case_problem.cost_of(c), evaluate(c)) for c in new})
