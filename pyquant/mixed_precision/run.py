"""pyquant.search: a format for every layer, from measured losses and latencies, checked before it is promised."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from pyquant.core import arguments
from pyquant.core.registry import OBJECTIVES
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.accuracy_limit import within_limit
from pyquant.mixed_precision.choices.fingerprint import fingerprint
from pyquant.mixed_precision.choices.switchable import USUAL_BATCHES, Config, SwitchableModel
from pyquant.mixed_precision.costs import CostTable, bits_cost, cost_table, size_cost
from pyquant.mixed_precision.decide import Findings, beyond_reach, order_of
from pyquant.mixed_precision.ledger import Ledger
from pyquant.mixed_precision.loss.evaluate import DISAGREEMENT, LossOfOutputs, TaskMetric
from pyquant.mixed_precision.options import SearchOptions
from pyquant.mixed_precision.plan import Plan
from pyquant.mixed_precision.record import plan_of
from pyquant.mixed_precision.solve.problem import Constraint, SearchProblem
from pyquant.mixed_precision.solve.prune import drop_slower
from pyquant.mixed_precision.solve.solver import search_front
from pyquant.mixed_precision.tables import first_tables, latency_table, single, timed
from pyquant.report.records.latency import LatencyTable
from pyquant.report.records.pareto import pareto_front


def run_search(
    model: nn.Module,
    example_inputs: Any,
    calib_data_loader: Iterable[Any] | None,
    formats: Sequence[str],
    eval_fn: Callable[[nn.Module], Any] | None,
    max_drop: float | None,
    objective: str,
    options: dict[str, Any],
) -> Plan:
    """pyquant.search, whose arguments these are; `options` as a dictionary."""
    given = SearchOptions.of(options)
    OBJECTIVES.find(objective)
    if max_drop is not None:
        arguments.number("max_drop", max_drop, 0, infinite=True)
    if max_drop is not None and eval_fn is None and given.metric != "kl":
        allowed = "a function of the model; or max_drop=None and another limit such as max_loss"
        raise ArgumentError("eval_fn", f"None, with metric {given.metric!r}", allowed)
    if max_drop is None and not given.limits():
        raise ArgumentError("max_drop", "None, and no other limit", "a limit: max_drop, max_loss, max_latency_us, "
                            "max_size_bytes or max_effective_bits")  # fmt: skip
    switchable = SwitchableModel(
        model, formats, calib_data_loader, num_batches=given.num_batches, batch_to_inputs=given.batch_to_inputs,
        grouping=given.grouping, filter_fn=given.filter_fn, to_output=given.to_output,
    )  # fmt: skip
    return _Search(switchable, example_inputs, eval_fn, max_drop, objective, given).run()


class _Search:
    """One search; its methods are its steps, in order."""

    def __init__(
        self,
        switchable: SwitchableModel,
        example_inputs: Any,
        eval_fn: Callable[[nn.Module], Any] | None,
        max_drop: float | None,
        objective: str,
        options: SearchOptions,
    ) -> None:
        self.switchable, self.example, self.objective, self.options = switchable, example_inputs, objective, options
        self.max_drop = max_drop
        self.loss = LossOfOutputs(switchable, options.metric, _score_batches(options))
        self.task = None if eval_fn is None else TaskMetric(switchable, eval_fn, options.higher_is_better)
        self.agreement = (
            LossOfOutputs(switchable, DISAGREEMENT, self.loss.batches)
            if eval_fn is None and max_drop is not None
            else None
        )
        self.needs_latency = objective == "latency" or options.max_latency_us is not None

    def run(self) -> Plan:
        settings = {"objective": self.objective, "max_drop": f"{self.max_drop}", **self.options.settings()}
        facts = fingerprint(self.switchable, self.loss.batches, *sorted(settings.items()))
        progress = self.options.progress
        on_piece = None if progress is None else lambda stage, key, done, total: progress(stage, done, total)
        with Ledger(facts, self.options.journal, on_piece) as ledger:
            latency = self._latency(ledger)
            costs = cost_table(self.objective, self.switchable, latency)
            problem = self._problem(ledger, costs, latency)
            losses = self._front(ledger, problem)
            drops, quality, feasible = self._within(ledger, problem, losses)
            findings = Findings(
                switchable=self.switchable,
                objective=self.objective,
                max_drop=self.max_drop,
                options=self.options,
                problem=problem,
                costs=costs,
                latency=latency,
                losses=losses,
                drops=drops,
                quality=quality,
                times=self._times(ledger, problem, feasible, losses),
                feasible=feasible,
                dropped=drop_slower(problem, self.options.never_slower_margin)[1],
                counts=ledger.counts,
                settings=settings,
                has_task=self.task is not None,
            )
            return plan_of(findings)

    def _latency(self, ledger: Ledger) -> LatencyTable | None:
        return latency_table(ledger, self.switchable, self.example, self.options) if self.needs_latency else None

    def _problem(self, ledger: Ledger, costs: CostTable, latency: LatencyTable | None) -> SearchProblem:
        allowed = np.array(self.switchable.allowed)
        limits = self._constraints(latency)
        for limit in limits:  # before any loss is measured
            least = tuple(np.where(allowed, limit.table, np.inf).argmin(-1).tolist())
            if limit.cost_of(least) > limit.limit:
                raise beyond_reach(self.switchable, limit, least)
        tables = first_tables(ledger, self.switchable, self.loss, self.task, self.options)
        return SearchProblem(
            tuple(g.name for g in self.switchable.groups),
            tuple(f.name for f in self.switchable.formats),
            loss=np.array(tables),
            cost=np.array(costs.table),
            cost_base=costs.base,
            cost_pairs=None if costs.pairs is None else np.array(costs.pairs),
            allowed=allowed,
            constraints=limits,
        )

    def _constraints(self, latency: LatencyTable | None) -> tuple[Constraint, ...]:
        limits = []
        for name, limit, make in (
            ("max_latency_us", self.options.max_latency_us, lambda: cost_table("latency", self.switchable, latency)),
            ("max_size_bytes", self.options.max_size_bytes, lambda: size_cost(self.switchable)),
            ("max_effective_bits", self.options.max_effective_bits, lambda: bits_cost(self.switchable)),
        ):
            if limit is not None:
                table = make()
                limits.append(Constraint(name, np.array(table.table), limit, table.base))
        return tuple(limits)

    def _front(self, ledger: Ledger, problem: SearchProblem) -> dict[Config, float]:
        """Losses of the configurations that matter, the float one first."""
        budget = self.options.budget

        def many(configs: Sequence[Config]) -> list[float]:
            return ledger.numbers("configurations", configs, self.loss, budget, key="loss")

        # Single groups were measured already, on the same data, where the first tables come from them.
        is_measured = self.options.sensitivity in ("", self.options.metric)
        start = problem.uniform(0)
        measured = {
            single(start, g, f): float(problem.loss[g, f])
            for g in range(len(problem.groups))
            for f in range(1, len(problem.formats))
            if is_measured and problem.mask[g, f]
        }
        points = search_front(
            problem, self.loss, budget, batch=self.options.batch, algorithm=self.options.algorithm, known=measured,
            evaluate_many=many, max_loss=self.options.max_loss, rng_seed=self.options.seed,
            never_slower_margin=self.options.never_slower_margin,
        )  # fmt: skip
        return {start: 0.0, **measured, **{p.config: p.loss for p in points}}

    def _within(
        self, ledger: Ledger, problem: SearchProblem, losses: dict[Config, float]
    ) -> tuple[dict[Config, float], dict[Config, float], list[Config]]:
        """Drops and quality of what was evaluated, and the configurations that keep every limit."""
        options = self.options
        most = float("inf") if options.max_loss is None else options.max_loss
        open_ = [c for c, loss in losses.items() if loss <= most and not problem.violations(c)]
        front = front_of(problem, {c: losses[c] for c in open_})
        start = problem.uniform(0)
        if self.max_drop is None or (self.task is None and self.agreement is None):
            return {}, {}, front
        drops, quality = {start: 0.0}, {}
        if self.task is not None:
            task = self.task
            task.baseline = ledger.plain("evaluations", "float", lambda: task.baseline, options.evaluations + 1)
            quality[start] = task.baseline

        def drop_of(index: int) -> float:
            config = rest[index]
            if self.task is not None:
                task, calls = self.task, options.evaluations + 1
                quality[config] = ledger.plain("evaluations", str(config), lambda: task.value(config), calls)
                drops[config] = task.loss_of(quality[config])
            elif self.agreement is not None:
                (drops[config],) = ledger.numbers(
                    "evaluations", [config], self.agreement, options.evaluations, "changed"
                )
                quality[config] = 1 - drops[config]
            return drops[config]

        rest = [c for c in front if c != start]
        within, _ = within_limit([losses[c] for c in rest], drop_of, self.max_drop, options.evaluations)
        return drops, quality, [*([start] if start in open_ else []), *(rest[i] for i in within)]

    def _times(
        self, ledger: Ledger, problem: SearchProblem, feasible: list[Config], losses: dict[Config, float]
    ) -> dict[Config, tuple[float, float, float]]:
        """Microseconds end to end of the best candidates and of the float model: (median, low, high)."""
        if not self.needs_latency or not feasible:
            return {}
        first = sorted(feasible, key=order_of(problem, losses, self.max_drop, self.options))[: self.options.candidates]
        return timed(ledger, self.switchable, [problem.uniform(0), *first], self.example, self.options)


def front_of(problem: SearchProblem, losses: dict[Config, float]) -> list[Config]:
    """The configurations that none dominates in (cost, loss), the cheapest first."""
    configs = list(losses)
    return [configs[i] for i in pareto_front([(problem.cost_of(c), losses[c]) for c in configs])]


def _score_batches(options: SearchOptions) -> list[Any] | None:
    if options.score_data is None:
        return None
    return list(itertools.islice(options.score_data, options.num_batches or USUAL_BATCHES))
