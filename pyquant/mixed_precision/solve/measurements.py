"""What was measured so far, within a budget: the one way in which algorithms evaluate configurations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve.evaluations import Journal
from pyquant.mixed_precision.solve.problem import Config, SearchProblem

Evaluate = Callable[[Config], float]
EvaluateMany = Callable[[Sequence[Config]], Sequence[float]]


@dataclass(frozen=True)
class Measured:
    """A configuration that was evaluated.

    cost       as the problem's tables say.
    loss       as it was measured.
    predicted  the loss that was expected when it was chosen.
    """

    config: Config
    cost: float
    loss: float
    predicted: float


class BudgetSpent(Exception):
    """The next evaluation would exceed the budget: algorithms let it pass, search_front ends with what is there."""


class Measurements:
    """Evaluates configurations once each, in order, and keeps them.

    evaluate       the loss of a configuration: a finite number, or infinity for a model that broke.
    budget         how many configurations may be evaluated.
    known          losses that need no evaluation; the configuration of first formats has problem.loss_base where the
                   tables say so (all of loss[:, 0] is 0).
    journal        gets each evaluation, and answers for those it holds.
    evaluate_many  evaluates several at once, in any way; None: one after the other.
    """

    def __init__(
        self,
        problem: SearchProblem,
        evaluate: Evaluate,
        budget: int,
        known: Mapping[Config, float] | None = None,
        journal: Journal | None = None,
        evaluate_many: EvaluateMany | None = None,
    ) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise ArgumentError("budget", repr(budget), "an integer of at least 1")
        self.problem, self.budget, self.journal = problem, budget, journal
        self._many: EvaluateMany = evaluate_many or (lambda configs: [evaluate(c) for c in configs])
        self._is_many = evaluate_many is not None
        self.points: list[Measured] = []
        self.known: dict[Config, float] = {problem.check(c): _loss(c, v) for c, v in (known or {}).items()}
        first = problem.uniform(0)
        if not any(first) and not problem.loss[:, 0].any():
            self.known.setdefault(first, problem.loss_base)
        self._found: dict[Config, float] = {}

    @property
    def left(self) -> int:
        """How many evaluations the budget still has."""
        return self.budget - len(self.points)

    @property
    def losses(self) -> dict[Config, float]:
        """Every loss there is, known or measured."""
        return {**self.known, **self._found}

    def measure(self, configs: Sequence[Config], predicted: Sequence[float] | None = None) -> list[float]:
        """The losses of configurations, evaluating those that are new. -> as many as configs.

        predicted  what was expected; None: what the problem's tables say.
        Raises BudgetSpent when not all could be evaluated, after those that could.
        """
        expected = dict(zip(configs, predicted or [self.problem.loss_of(c) for c in configs], strict=True))
        new = [c for c in dict.fromkeys(configs) if c not in self.losses]
        for group in [new[: self.left]] if self._is_many else [[c] for c in new[: self.left]]:
            for config, loss in zip(group, self._evaluate(group), strict=True):
                self._found[config] = loss
                self.points.append(Measured(config, self.problem.cost_of(config), loss, float(expected[config])))
        if any(c not in self.losses for c in configs):
            raise BudgetSpent
        losses = self.losses
        return [losses[c] for c in configs]

    def _evaluate(self, configs: Sequence[Config]) -> list[float]:
        held = {} if self.journal is None else self.journal.losses
        new = [c for c in configs if c not in held]
        losses = list(self._many(new)) if new else []
        if len(losses) != len(new):
            raise ArgumentError("evaluate_many", f"{len(losses)} losses", f"{len(new)}: one for each configuration")
        for config, loss in zip(new, losses, strict=True):
            loss = _loss(config, loss)
            if self.journal is not None:
                self.journal.append(config, loss)
            held = {**held, config: loss}
        return [held[c] for c in configs]


def _loss(config: Config, loss: float) -> float:
    try:
        found = float(loss)
    except (TypeError, ValueError):
        raise ArgumentError("evaluate", f"{loss!r} for {config}", "a number") from None
    if math.isnan(found) or found == -math.inf:
        raise ArgumentError("evaluate", f"{found} for {config}", "a finite loss, or inf where a model breaks")
    return found
