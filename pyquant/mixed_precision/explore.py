"""Which configurations a search measures: the whole front, then closer and closer to where a task's metric still holds.

A limit on a metric says nothing about the loss that orders configurations until some are evaluated with both. So the
budget is spent in rounds: each ends with a few evaluations that say at which loss the drop reaches its limit, and the
next one looks for the cheapest configuration below that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from pyquant.mixed_precision.accuracy_limit import loss_at_limit, within_limit
from pyquant.mixed_precision.decide import front_of
from pyquant.mixed_precision.solve.measurements import Measured
from pyquant.mixed_precision.solve.problem import Config, SearchProblem

ROUNDS: Final = (0.5, 0.5, 1.0)  # shares of what is left, of the budget and of the evaluations
FEW: Final = 4  # evaluations, fewer are not divided


class Front(Protocol):
    """search_front, with all arguments but these."""

    def __call__(self, budget: int, known: Mapping[Config, float], max_loss: float | None) -> list[Measured]: ...


@dataclass
class Drops:
    """How much worse configurations are than the float model, in a metric that is expensive.

    drop_of      configuration -> drop.
    limit        the largest drop that is allowed.
    evaluations  calls of drop_of, at most.
    start        the float model, which drops nothing.
    """

    drop_of: Callable[[Config], float]
    limit: float
    evaluations: int
    start: Config
    known: dict[Config, float] = field(init=False)

    def __post_init__(self) -> None:
        self.known = {self.start: 0.0}

    @property
    def left(self) -> int:
        """Evaluations that are still to be had."""
        return self.evaluations - len(self.known) + 1

    def within(self, losses: Mapping[Config, float], evaluations: int, is_last: bool) -> list[Config]:
        """The configurations that hold the limit, as far as so many further evaluations tell."""
        configs = list(losses)
        known = {i: self.known[c] for i, c in enumerate(configs) if c in self.known}
        values = [losses[c] for c in configs]
        kept, drops = within_limit(values, lambda i: self.drop_of(configs[i]), self.limit, evaluations, known, is_last)
        self.known |= {configs[i]: drop for i, drop in drops.items()}
        return [configs[i] for i in kept]


def explore(
    problem: SearchProblem,
    front: Front,
    known: Mapping[Config, float],
    budget: int,
    max_loss: float | None,
    drops: Drops | None,
    *,
    in_rounds: bool = True,
) -> tuple[dict[Config, float], list[Config]]:
    """Measure the front, closer to the limit of drops from round to round. -> (losses, what keeps every limit).

    known      losses that need no measurement.
    budget     losses that are measured, at most.
    max_loss   the largest loss that is allowed, or None.
    drops      the limit on a metric, or None: everything that keeps the other limits is given, of the front.
    in_rounds  False: one round, which knows nothing of drops.
    """
    losses, limit = dict(known), max_loss
    within: list[Config] = []
    rounds = ROUNDS if in_rounds and drops is not None and drops.evaluations >= FEW else (1.0,)
    left = budget
    for i, share in enumerate(rounds):
        found = front(-int(-share * left // 1), losses, limit) if left else []
        left -= len(found)
        losses |= {p.config: p.loss for p in found}
        open_ = {c: y for c, y in losses.items() if (max_loss is None or y <= max_loss) and not problem.violations(c)}
        best = {c: losses[c] for c in front_of(problem, open_)}
        if drops is None:
            return losses, list(best)
        is_last = i == len(rounds) - 1
        within = drops.within(best, drops.left if is_last else -int(-share * drops.left // 1), is_last)
        if drops.start in open_:  # what plans are compared with, be it on the front or not
            within = [drops.start, *(c for c in within if c != drops.start)]
        limits = [loss_at_limit(((losses[c], d) for c, d in drops.known.items()), drops.limit), max_loss]
        limit = min((y for y in limits if y is not None), default=None)
    return losses, within
