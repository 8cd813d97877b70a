"""The search algorithms by name, and search_front, the one call for all of them. A new algorithm is one file."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyquant.core import arguments
from pyquant.core.registry import SEARCH_ALGORITHMS
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve.measurements import (
    BudgetSpent,
    Evaluate,
    EvaluateMany,
    Measured,
    Measurements,
    open_journal,
)
from pyquant.mixed_precision.solve.problem import Config, SearchProblem
from pyquant.mixed_precision.solve.prune import drop_slower
from pyquant.report.records.pareto import Point

CORNER_SHARES: Final = (0.3, 1.0)  # of the loss of the lowest uniform configuration: the good end, and the whole front
EXACT_GROUPS: Final = 24  # up to here the front of the model is exact; above, costs are compared on a grid
COARSE: Final = 1e-3


@dataclass(frozen=True, eq=False)
class Search:
    """What an algorithm is given.

    problem   without the options that are never worth having (drop_slower).
    seed      of everything that is drawn.
    max_loss  the largest loss that is of interest, or None.
    least_loss  without max_loss: look for what loses least within the constraints.
    batch     how many configurations to propose at once.
    stop_gain share of the hypervolume below which more is not worth an evaluation.
    start     configurations to begin with.
    """

    problem: SearchProblem
    measurements: Measurements
    start: tuple[Config, ...]
    seed: int = 0
    max_loss: float | None = None
    batch: int = 1
    stop_gain: float = 0.001
    fixed_corner: Point | None = None
    corner_shares: tuple[float, ...] = CORNER_SHARES
    least_loss: bool = False

    def measure(self, configs: Sequence[Config], predicted: Sequence[float] | None = None) -> list[float]:
        """The losses of configurations. Raises BudgetSpent, which an algorithm does not catch."""
        return self.measurements.measure(configs, predicted)

    def measure_all(self, configs: Iterable[Config]) -> None:
        """Those that keep the constraints, a batch at a time."""
        feasible = [config for config in configs if not self.problem.violations(config)]
        for i in range(0, len(feasible), self.batch):
            self.measure(feasible[i : i + self.batch])

    @property
    def losses(self) -> dict[Config, float]:
        """Every loss there is so far, of configurations of the pruned problem."""
        mask = self.problem.mask
        measured = self.measurements.losses.items()
        return {c: loss for c, loss in measured if all(mask[g, f] for g, f in enumerate(c))}

    @property
    def epsilon(self) -> float:
        """How coarse fronts of the model are: exact up to 24 groups."""
        return 0.0 if len(self.problem.groups) <= EXACT_GROUPS else COARSE

    @property
    def corners(self) -> tuple[Point, ...]:
        """Points (cost, loss) beyond which nothing counts, as search_front explains them; the nearest first."""
        if self.fixed_corner is not None:
            return (self.fixed_corner,)
        # where limits rule floating point out, what keeps them may cost more
        cost = max(self.problem.cost_of(c) for c in (self.problem.uniform(0), *self.start))
        base = self.problem.loss_base
        if self.max_loss is not None:
            return ((cost, base + 1.25 * (self.max_loss - base)),)
        lowest = self.problem.uniform(len(self.problem.formats) - 1)
        expected = self.problem.loss_of(lowest) - base
        rise = self.losses.get(lowest, expected + base) - base
        if not 0 < rise < math.inf:
            rise = abs(expected) or 1.0
        return tuple((cost, base + share * rise) for share in self.corner_shares)


SearchFunction = Callable[[Search], None]


def search_algorithm(name: str) -> Callable[[SearchFunction], SearchFunction]:
    """Registers a function (Search) -> None, which measures configurations, as search algorithm `name`.

    Raises ArgumentError for a name that is taken.
    """
    return SEARCH_ALGORITHMS.register(name)


def search_front(
    problem: SearchProblem,
    evaluate: Evaluate,
    budget: int = 40,
    corner: Point | None = None,
    journal: str | os.PathLike[str] | None = None,
    batch: int = 1,
    seeds: Sequence[Config] | None = None,
    *,
    algorithm: str = "dp",
    known: Mapping[Config, float] | None = None,
    evaluate_many: EvaluateMany | None = None,
    max_loss: float | None = None,
    least_loss: bool = False,
    corner_share: float | None = None,
    stop_gain: float = 0.001,
    never_slower_margin: float | None = 0.01,
    rng_seed: int = 0,
) -> list[Measured]:
    """Measure the configurations that matter most for the front of (cost, loss). -> them, in the order of measuring.

    evaluate       the measured loss of a configuration: finite, or inf where the model breaks.
    budget         evaluations at most. The configuration of first formats needs none: it loses problem.loss_base
                   (unless loss[:, 0] says that the first format loses something).
    corner         (cost, loss) beyond which nothing counts; None: the cost of the first formats, and a quarter beyond
                   max_loss, or without one two corners whose gains are added: 30 % and all of what the lowest uniform
                   configuration loses.
    journal        a path: evaluations it holds are not repeated, new ones are added.
    batch          how many configurations are proposed at once; the plan depends on it, not on who evaluates them.
    seeds          configurations to begin with; None: the uniform ones.
    algorithm      'dp' (the method that wins), 'exhaustive', 'greedy', 'bisection' or 'nsga2', or one of your own.
    known          losses that need no evaluation, such as those of one group lowered at a time on the same data.
    evaluate_many  evaluates a batch at once, for several processes; None: evaluate, one after the other.
    max_loss       look for the cheapest configuration that loses no more.
    least_loss     without max_loss: look for the configuration that loses least within the problem's constraints.
    corner_share   without corner and max_loss: one corner, at this share of the lowest uniform configuration's loss.
    stop_gain      end when all that is still expected is less than this share of the hypervolume; 0: spend the budget.
    never_slower_margin  drop options that are not cheaper than the first format by this share; None: drop nothing.
    rng_seed       of what is drawn; equal arguments give equal results.
    Raises ArgumentError, and CheckpointError for a journal that cannot be used. Source: docs/search.md 3.

    Example:
        >>> problem = SearchProblem(("a", "b"), ("fp32", "int4"), loss=[[0, 1], [0, 3]], cost=[[8, 2], [8, 2]])
        >>> points = search_front(problem, lambda config: 1.0 * config[0] + 3.2 * config[1], corner=(17, 5))
        >>> [(point.config, point.loss) for point in points]
        [((1, 1), 4.2), ((1, 0), 1.0), ((0, 1), 3.2)]
    """
    find_front: SearchFunction = SEARCH_ALGORITHMS.find(algorithm)
    arguments.whole("batch", batch, 1)
    arguments.whole("rng_seed", rng_seed, 0)
    if max_loss is not None and not math.isfinite(max_loss):
        raise ArgumentError("max_loss", max_loss, "a finite number or None")
    if corner is not None and not _is_point(corner):
        raise ArgumentError("corner", repr(corner), "None or two finite numbers: (cost, loss)")
    if corner_share is not None:
        arguments.number("corner_share", corner_share, 0, above=True)
    if not 0 <= stop_gain < 1:
        raise ArgumentError("stop_gain", stop_gain, "0 to below 1")
    pruned = problem if never_slower_margin is None else drop_slower(problem, never_slower_margin)[0]
    uniform = [pruned.uniform(f) for f in range(len(pruned.formats))]
    start = tuple(dict.fromkeys(uniform if seeds is None else [pruned.check(c) for c in seeds]))
    start = tuple(c for c in start if not pruned.violations(c))
    with contextlib.nullcontext() if journal is None else open_journal(journal, problem) as opened:
        measurements = Measurements(problem, evaluate, budget, known, opened, evaluate_many)
        shares = CORNER_SHARES if corner_share is None else (corner_share,)
        search = Search(pruned, measurements, start, rng_seed, max_loss, batch, stop_gain, corner, shares, least_loss)
        with contextlib.suppress(BudgetSpent):
            find_front(search)
    return list(measurements.points)


def _is_point(corner: object) -> bool:
    if not isinstance(corner, (tuple, list)) or len(corner) != 2:
        return False
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in corner)
