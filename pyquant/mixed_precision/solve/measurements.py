"""What was measured so far, within a budget: the one way in which algorithms evaluate configurations."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyquant.core import arguments
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.journal import Journal
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
        arguments.whole("budget", budget, 1)
        self.problem, self.budget, self.journal = problem, budget, journal
        self._many: EvaluateMany = evaluate_many or (lambda configs: [evaluate(c) for c in configs])
        self._is_many = evaluate_many is not None
        self.points: list[Measured] = []
        self.known: dict[Config, float] = {problem.check(c): _loss(c, v) for c, v in (known or {}).items()}
        first = problem.uniform(0)
        if not any(first) and not problem.loss[:, 0].any():
            self.known.setdefault(first, problem.loss_base)
        self._measured: dict[Config, float] = {}
        self._held = {} if journal is None else dict(_evaluation(problem, journal, key) for key in journal.entries)

    @property
    def left(self) -> int:
        """How many evaluations the budget still has."""
        return self.budget - len(self.points)

    @property
    def losses(self) -> dict[Config, float]:
        """Every loss there is, known or measured."""
        return {**self.known, **self._measured}

    def measure(self, configs: Sequence[Config], predicted: Sequence[float] | None = None) -> list[float]:
        """The losses of configurations, evaluating those that are new. -> as many as configs.

        predicted  what was expected; None: what the problem's tables say.
        Raises BudgetSpent when not all could be evaluated, after those that could.
        """
        expected = dict(zip(configs, predicted or [self.problem.loss_of(c) for c in configs], strict=True))
        new = [c for c in dict.fromkeys(configs) if c not in self.losses]
        for group in [new[: self.left]] if self._is_many else [[c] for c in new[: self.left]]:
            for config, loss in zip(group, self._evaluate(group), strict=True):
                self._measured[config] = loss
                self.points.append(Measured(config, self.problem.cost_of(config), loss, float(expected[config])))
        if any(c not in self.losses for c in configs):
            raise BudgetSpent
        losses = self.losses
        return [losses[c] for c in configs]

    def _evaluate(self, configs: Sequence[Config]) -> list[float]:
        new = [c for c in configs if c not in self._held]
        losses = list(self._many(new)) if new else []
        if len(losses) != len(new):
            raise ArgumentError("evaluate_many", f"{len(losses)} losses", f"{len(new)}: one for each configuration")
        for config, loss in zip(new, losses, strict=True):
            self._held[config] = _loss(config, loss)
            if self.journal is not None:
                self.journal.add(" ".join(map(str, config)), self._held[config].hex())  # JSON has no infinity
        return [self._held[c] for c in configs]


def open_journal(path: str | os.PathLike[str], problem: SearchProblem) -> Journal:
    """A journal of evaluations of one problem, under a lock while it is open."""
    return Journal(path, "evaluations of a search", {"problem": problem.fingerprint()})


def _evaluation(problem: SearchProblem, journal: Journal, key: str) -> tuple[Config, float]:
    try:
        loss = float.fromhex(journal.entries[key])
        if not math.isnan(loss):
            return problem.check([int(word) for word in key.split(" ")]), loss
    except (TypeError, ValueError):  # an ArgumentError is a ValueError
        pass
    text = f"{journal.path}: {key!r}: no evaluation of this problem; allowed: a journal as it was written"
    raise CheckpointError(text)


def _loss(config: Config, loss: float) -> float:
    try:
        number = float(loss)
    except (TypeError, ValueError):
        raise ArgumentError("evaluate", f"{loss!r} for {config}", "a number") from None
    if math.isnan(number) or number == -math.inf:
        raise ArgumentError("evaluate", f"{number} for {config}", "a finite loss, or inf where a model breaks")
    return number
