"""One sensitivity metric in one mode over one model: which configurations, what they take, and the report of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Final, Protocol, TypeVar

from pyquant.core import arguments
from pyquant.core.registry import SCORERS
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.ledger import Ledger
from pyquant.mixed_precision.loss.direction import warn_of_direction
from pyquant.mixed_precision.loss.evaluate import Evaluator, TaskMetric
from pyquant.mixed_precision.loss.scorers import Scorer, Scoring
from pyquant.mixed_precision.loss.suspects import usual_suspects
from pyquant.report.records.float_format import alike
from pyquant.report.records.sensitivity import (
    Cells,
    SensitivityCost,
    SensitivityGroup,
    SensitivityLatency,
    SensitivityReport,
    SensitivityStep,
    SensitivityTask,
)

MODES: Final = ("one_at_a_time", "leave_one_out", "cumulative")
K = TypeVar("K")


class Latency(Protocol):
    """A latency table, as far as it is needed here (pyquant.report.records.latency.LatencyTable)."""

    def predict(self, config: Config) -> float:
        """Microseconds of the model in a configuration."""
        ...


class Analysis:
    """A metric and a mode over what `scoring` holds. Raises ArgumentError for names that do not go together."""

    def __init__(self, scoring: Scoring, metric: str, mode: str) -> None:
        check_names(metric, mode)
        self.scoring, self.mode = scoring, mode
        self.scorer: Scorer = SCORERS.find(metric)(scoring)
        if mode == "leave_one_out" and self.scorer.evaluator is None:
            allowed = "a metric of whole configurations: 'kl', 'sqnr', 'mse', 'cosine', 'eval'"
            raise ArgumentError("metric", f"{metric!r} in mode 'leave_one_out'", allowed)
        # what whole configurations are measured by
        self.measured: Evaluator = self.scorer.evaluator or scoring.loss
        self.groups, self.allowed = scoring.switchable.groups, scoring.switchable.allowed
        self.formats = tuple(f.name for f in scoring.switchable.formats)
        self.zeros: Config = (0,) * len(self.groups)
        self.lowered = [f for f in range(1, len(self.formats)) if any(row[f] for row in self.allowed)]

    # ---- configurations

    def cells(self) -> dict[tuple[int, int], Config]:
        """{(group, format): the configuration that is measured for it}."""
        if self.mode == "leave_one_out":
            return {(g, f): self._uniform(f, without=g) for g, f in self.scoring.cells()}
        return {(g, f): tuple(f if i == g else 0 for i in range(len(self.groups))) for g, f in self.scoring.cells()}

    def whole(self) -> dict[int, Config]:
        """{format: the configuration with everything in it}, where the mode measures them as well as the cells."""
        return {f: self._uniform(f) for f in self.lowered} if self.mode == "leave_one_out" else {}

    def _uniform(self, format: int, without: int | None = None) -> Config:
        return tuple(format if row[format] and g != without else 0 for g, row in enumerate(self.allowed))

    # ---- what it takes

    def cost(self, calibration_passes: int) -> SensitivityCost:
        """Of everything, nothing being in a journal."""
        work = [] if self.scorer.evaluator is not None else self.scorer.work()
        configs = {*self.cells().values(), *self.whole().values()}
        steps = sum(row[f] for row in self.allowed for f in self.lowered) if self.mode == "cumulative" else 0
        measured = len(configs if self.scorer.evaluator is not None else ()) + steps
        if steps and self.scorer.evaluator is not None:
            measured -= len(self.lowered)  # the first step of each format is a cell
        tasks = 0
        if isinstance(self.measured, TaskMetric):
            measured, tasks = 0, measured + (self.zeros not in configs)
        elif self.scoring.task is not None:
            tasks = 1 + steps if steps else len(configs | {self.zeros})
        batches = len(self.scoring.loss.batches)
        passes = measured - (self.zeros in configs and measured > 0)  # the float configuration needs none
        floats = batches if measured or self.scorer.needs_floats else 0
        return SensitivityCost(
            calibration_passes=calibration_passes,
            forward_passes=sum(w.forwards for w in work) + batches * passes + floats,
            backward_passes=sum(w.backwards for w in work),
            evaluations=len(work) + measured + tasks,
            eval_calls=tasks,
        )

    # ---- the work

    def run(self, ledger: Ledger, cost: SensitivityCost, latency: Latency | None, scored_on: str) -> SensitivityReport:
        """Everything, through the ledger."""
        switchable = self.scoring.switchable
        measure = Measure(ledger)
        if self.scoring.task is not None:  # first: one call, which shows whether eval_fn works
            measure.values(self.scoring.task, {0: self.zeros})
        loss = self._grid(self._losses(ledger, measure))
        whole = self.whole()
        steps = self._steps(measure, loss, latency) if self.mode == "cumulative" else ()
        uniform = measure.loss(self.measured, whole)
        uniform |= {self.formats.index(s.format): s.loss for s in steps}  # the last of each counts
        suspects = usual_suspects(switchable)
        return SensitivityReport(
            model=type(switchable.model).__name__,
            metric=self.scorer.name,
            unit=self.scorer.unit,
            mode=self.mode,
            formats=self.formats,
            groups=tuple(
                SensitivityGroup(g.name, g.layers, numel, suspects.get(g.name, ""))
                for g, numel in zip(self.groups, switchable.numel, strict=True)
            ),
            loss=loss,
            additive=self.scorer.predicts,
            step_unit=self.measured.unit,
            uniform=self._row(uniform),
            steps=steps,
            task=self._task(measure, steps),
            latency=self._latency(latency, steps),
            refusals=tuple(f"{layer}: {name}: {why}" for (layer, name), why in sorted(switchable.refusals.items())),
            cost=cost,
            scored_on=scored_on,
            environment=asdict(describe_environment(switchable.device)),
        )

    def _losses(self, ledger: Ledger, measure: Measure) -> dict[tuple[int, int], float]:
        if self.scorer.evaluator is not None:
            return measure.loss(self.scorer.evaluator, self.cells())
        table = self.scorer.scored(ledger, "")
        return {(g, f): table[g][f] for g, f in self.cells()}

    def _steps(self, measure: Measure, loss: Cells, latency: Latency | None) -> tuple[SensitivityStep, ...]:
        steps: list[SensitivityStep] = []
        for f in self.lowered:
            losses_alone = {g: value for g, row in enumerate(loss) if (value := row[f]) is not None}
            order = sorted(losses_alone, key=lambda g: (losses_alone[g], g))
            configs = {
                g: tuple(f if i in order[: n + 1] else 0 for i in range(len(self.groups))) for n, g in enumerate(order)
            }
            losses = measure.loss(self.measured, configs)
            values = {} if self.scoring.task is None else measure.values(self.scoring.task, configs)
            for g, config in configs.items():
                us = None if latency is None else float(latency.predict(config))
                steps.append(SensitivityStep(self.formats[f], self.groups[g].name, losses[g], values.get(g), us))
        return tuple(steps)

    def _task(self, measure: Measure, steps: Sequence[SensitivityStep]) -> SensitivityTask | None:
        """The user's metric wherever the report has a loss; in the cumulative mode the steps have it."""
        task = self.scoring.task
        if task is None:
            return None
        baseline = measure.values(task, {0: self.zeros})[0]
        values = measure.values(task, {} if steps and task is not self.measured else self.cells())
        uniform: dict[int, float | None] = {**measure.values(task, self.whole())}
        uniform |= {self.formats.index(s.format): s.task for s in steps}
        task.baseline = baseline
        configs = [*values.values(), *uniform.values(), *(s.task for s in steps)]
        warn_of_direction(task, [value for value in configs if value is not None])
        grid, row = self._grid(values, baseline), self._row(uniform, baseline)
        return SensitivityTask(baseline, task.higher_is_better, grid, row)

    def _latency(self, latency: Latency | None, steps: Sequence[SensitivityStep]) -> SensitivityLatency | None:
        if latency is None:
            return None
        floats = float(latency.predict(self.zeros))
        cells = {cell: float(latency.predict(config)) for cell, config in self.cells().items()}
        whole = {f: float(latency.predict(self._uniform(f))) for f in self.lowered}
        return SensitivityLatency(floats, self._grid(cells, floats), self._row(whole, floats))

    def _grid(self, values: Mapping[tuple[int, int], float], floats: float = 0.0) -> Cells:
        """[groups][formats], None where nothing is known."""
        formats = range(1, len(self.formats))
        return tuple(self._row({f: values.get((g, f)) for f in formats}, floats) for g in range(len(self.groups)))

    def _row(self, values: Mapping[int, float | None], floats: float = 0.0) -> tuple[float | None, ...]:
        return (floats, *(values.get(f) for f in range(1, len(self.formats))))


class Measure:
    """Configurations through a ledger, each by a key of the caller's."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def values(self, evaluator: Evaluator, configs: Mapping[K, Config]) -> dict[K, float]:
        """Losses of outputs, or what a task metric is."""
        name = "eval" if isinstance(evaluator, TaskMetric) else evaluator.metric.name
        fn: Callable[[Config], float] = evaluator.value if isinstance(evaluator, TaskMetric) else evaluator
        keys = [f"{name} {','.join(map(str, config))}" for config in configs.values()]
        rows = self._ledger.rows("", keys, lambda config: [fn(config)], list(configs.values()), 1)
        return {key: row[0] for key, row in zip(configs, rows, strict=True)}

    def loss(self, evaluator: Evaluator, configs: Mapping[K, Config]) -> dict[K, float]:
        """Losses, small is better: for a task metric its drop."""
        if isinstance(evaluator, TaskMetric) and configs:
            zeros = (0,) * len(next(iter(configs.values())))
            evaluator.baseline = self.values(evaluator, {0: zeros})[0]
            return {key: evaluator.loss_of(value) for key, value in self.values(evaluator, configs).items()}
        return self.values(evaluator, configs)


def check_names(metric: str, mode: str) -> None:
    """Raises ArgumentError for an unknown metric or mode."""
    SCORERS.find(metric)
    arguments.one_of("mode", mode, MODES)


def check_latency(latency: Latency | None, switchable: SwitchableModel) -> None:
    """Raises ArgumentError for a table that names other groups or formats than the model has."""
    if latency is not None and not callable(getattr(latency, "predict", None)):
        raise ArgumentError("latency", arguments.shown(latency), "a LatencyTable, or what has its predict(config)")
    for what in ("groups", "formats"):
        names, given = [one.name for one in getattr(switchable, what)], getattr(latency, what, None)
        if given is not None and not (alike(given, names) if what == "formats" else list(given) == names):
            raise ArgumentError("latency", f"a table of {what} {', '.join(given)}"[:200], ", ".join(names)[:200])
