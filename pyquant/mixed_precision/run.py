"""pyquant.search: a format for every layer, from measured losses and latencies, checked before it is promised."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from pyquant.core import arguments
from pyquant.core.registry import OBJECTIVES
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.fingerprint import fingerprint
from pyquant.mixed_precision.choices.switchable import USUAL_BATCHES, Config, SwitchableModel
from pyquant.mixed_precision.costs import CostTable, cost_table
from pyquant.mixed_precision.decide import Findings, beyond_reach, order_of
from pyquant.mixed_precision.explore import Drops, Front, explore
from pyquant.mixed_precision.ledger import Ledger
from pyquant.mixed_precision.loss.direction import warn_of_direction
from pyquant.mixed_precision.loss.evaluate import DISAGREEMENT, LossOfOutputs, TaskMetric
from pyquant.mixed_precision.options import LIMITS, SearchOptions
from pyquant.mixed_precision.plan import Plan
from pyquant.mixed_precision.record import plan_of
from pyquant.mixed_precision.solve.measurements import Measured
from pyquant.mixed_precision.solve.problem import Constraint, SearchProblem
from pyquant.mixed_precision.solve.prune import drop_slower
from pyquant.mixed_precision.solve.solver import search_front
from pyquant.mixed_precision.tables import first_tables, latency_table, single, timed
from pyquant.report.records.latency import LatencyTable


class Search:
    """One call of pyquant.search, whose arguments these are, `options` as a dictionary; its methods are its steps."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        calib_data_loader: Iterable[Any] | None,
        formats: Sequence[str],
        eval_fn: Callable[[nn.Module], Any] | None,
        max_drop: float | None,
        objective: str,
        options: dict[str, Any],
    ) -> None:
        self.options = given = SearchOptions.of(options)
        OBJECTIVES.find(objective)
        if max_drop is not None:
            arguments.number("max_drop", max_drop, 0, infinite=True)
        if max_drop is not None and eval_fn is None and given.metric != "kl":
            allowed = "a function of the model; or max_drop=None and another limit such as max_loss"
            raise ArgumentError("eval_fn", f"None, with metric {given.metric!r}", allowed)
        if max_drop is None and not given.limits():
            allowed = f"a limit: max_drop, {', '.join(LIMITS[:-1])} or {LIMITS[-1]}"
            raise ArgumentError("max_drop", "None, and no other limit", allowed)
        self.switchable = SwitchableModel(
            model,
            formats,
            calib_data_loader,
            num_batches=given.num_batches,
            batch_to_inputs=given.batch_to_inputs,
            grouping=given.grouping,
            filter_fn=given.filter_fn,
            to_output=given.to_output,
        )
        self.example, self.max_drop, self.objective = example_inputs, max_drop, objective
        scored = None
        if given.score_data is not None:
            scored = list(itertools.islice(given.score_data, given.num_batches or USUAL_BATCHES))
        self.loss = LossOfOutputs(self.switchable, given.metric, scored)
        self.task = None if eval_fn is None else TaskMetric(self.switchable, eval_fn, given.higher_is_better)
        self.agreement = None
        if eval_fn is None and max_drop is not None:
            self.agreement = LossOfOutputs(self.switchable, DISAGREEMENT, self.loss.batches)
        self.needs_latency = objective == "latency" or given.max_latency_us is not None

    def run(self) -> Plan:
        settings = {"objective": self.objective, "max_drop": f"{self.max_drop}", **self.options.settings()}
        facts = fingerprint(self.switchable, self.loss.batches, *sorted(settings.items()))
        progress = self.options.progress
        on_piece = None if progress is None else lambda stage, key, done, total: progress(stage, done, total)
        with Ledger(facts, self.options.journal, on_piece) as ledger:
            self._check_reach(self._constraints(None))  # sizes and bits are known before anything is measured
            self._measure_baseline(ledger)
            latency = None
            if self.needs_latency:
                latency = latency_table(ledger, self.switchable, self.example, self.options)
            costs = cost_table(self.objective, self.switchable, latency)
            problem = self._problem(ledger, costs, latency)
            drops, quality = self._drops(ledger, problem)
            losses, feasible = explore(
                problem,
                self._front(ledger, problem),
                self._singles(problem),
                self.options.budget,
                self.options.max_loss,
                drops,
                in_rounds=self.options.corner_share is None and self.options.algorithm != "exhaustive",
            )
            findings = Findings(
                switchable=self.switchable,
                objective=self.objective,
                max_drop=self.max_drop,
                options=self.options,
                problem=problem,
                costs=costs,
                latency=latency,
                losses=losses,
                drops={} if drops is None else drops.known,
                quality=quality,
                times=self._times(ledger, problem, feasible, losses),
                feasible=feasible,
                dropped=drop_slower(problem, self.options.never_slower_margin, costs.text)[1],
                counts=ledger.counts,
                settings=settings,
                has_task=self.task is not None,
            )
            if self.task is not None:
                warn_of_direction(self.task, [value for config, value in quality.items() if any(config)])
            return plan_of(findings)

    def _problem(self, ledger: Ledger, costs: CostTable, latency: LatencyTable | None) -> SearchProblem:
        limits = self._constraints(latency)
        self._check_reach(limits)  # before any loss is measured
        tables = first_tables(ledger, self.switchable, self.loss, self.task, self.options)
        return SearchProblem(
            tuple(g.name for g in self.switchable.groups),
            tuple(f.name for f in self.switchable.formats),
            loss=np.array(tables),
            cost=np.array(costs.table),
            cost_base=costs.base,
            cost_pairs=None if costs.pairs is None else np.array(costs.pairs),
            allowed=np.array(self.switchable.allowed),
            constraints=limits,
        )

    def _check_reach(self, limits: Iterable[Constraint]) -> None:
        allowed = np.array(self.switchable.allowed)
        for limit in limits:
            least = tuple(np.where(allowed, limit.table, np.inf).argmin(-1).tolist())
            if not limit.allows(least):
                raise beyond_reach(self.switchable, limit, least)

    def _measure_baseline(self, ledger: Ledger) -> None:
        """The float model's metric, before all else: one call, which shows whether eval_fn works."""
        if (task := self.task) is not None and self.max_drop is not None:
            calls = self.options.evaluations + 1
            task.baseline = ledger.plain("evaluations", "float", lambda: task.baseline, calls)

    def _constraints(self, latency: LatencyTable | None) -> tuple[Constraint, ...]:
        """Limits that are set; None: without that on latency."""
        limits = []
        costs = {"max_latency_us": "latency", "max_size_bytes": "size", "max_effective_bits": "effective_bits"}
        for name, limit in self.options.limits().items():
            if name in costs and (costs[name] != "latency" or latency is not None):
                table = cost_table(costs[name], self.switchable, latency)
                limits.append(Constraint(name, np.array(table.table), limit, table.base))
        return tuple(limits)

    def _singles(self, problem: SearchProblem) -> dict[Config, float]:
        """Losses that are known before the front is looked for: the float model's, and those of single groups, where
        the first tables are of the same loss on the same data."""
        start = problem.uniform(0)
        measured = {
            single(start, g, f): float(problem.loss[g, f])
            for g in range(len(problem.groups))
            for f in range(1, len(problem.formats))
            if self.options.sensitivity in ("", self.options.metric) and problem.mask[g, f]
        }
        return {start: 0.0, **measured}

    def _front(self, ledger: Ledger, problem: SearchProblem) -> Front:
        """search_front for this problem, whose losses go through the ledger."""
        options = self.options

        def many(configs: Sequence[Config]) -> list[float]:
            return ledger.numbers("configurations", configs, self.loss, options.budget, key="loss")

        def front(budget: int, known: Mapping[Config, float], max_loss: float | None) -> list[Measured]:
            return search_front(
                problem,
                self.loss,
                budget,
                batch=options.batch,
                algorithm=options.algorithm,
                known=known,
                evaluate_many=many,
                max_loss=max_loss,
                least_loss=self.max_drop is None,
                corner_share=options.corner_share,
                rng_seed=options.seed,
                never_slower_margin=options.never_slower_margin,
            )

        return front

    def _drops(self, ledger: Ledger, problem: SearchProblem) -> tuple[Drops | None, dict[Config, float]]:
        """How drops are evaluated, None where they have no limit; and the quality of what was, which fills."""
        options, start, task, agreement = self.options, problem.uniform(0), self.task, self.agreement
        quality: dict[Config, float] = {}
        if self.max_drop is None:
            return None, quality
        if task is not None:
            calls = options.evaluations + 1
            quality[start] = task.baseline

            def by_task(config: Config) -> float:
                quality[config] = ledger.plain("evaluations", str(config), lambda: task.value(config), calls)
                return task.loss_of(quality[config])

            return Drops(by_task, self.max_drop, options.evaluations, start), quality
        if agreement is not None:

            def by_agreement(config: Config) -> float:
                (drop,) = ledger.numbers("evaluations", [config], agreement, options.evaluations, "changed")
                quality[config] = 1 - drop
                return drop

            return Drops(by_agreement, self.max_drop, options.evaluations, start), quality
        return None, quality

    def _times(
        self, ledger: Ledger, problem: SearchProblem, feasible: list[Config], losses: dict[Config, float]
    ) -> dict[Config, tuple[float, float, float]]:
        """Microseconds end to end of the best candidates and of the float model: (median, low, high)."""
        if not self.needs_latency or not feasible:
            return {}
        has_quality = self.max_drop is not None or self.options.max_loss is not None
        first = sorted(feasible, key=order_of(problem, losses, has_quality))[: self.options.candidates]
        return timed(ledger, self.switchable, [problem.uniform(0), *first], self.example, self.options)
