"""What was found out about the sensitivity of a model's layers, and the skip list that follows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.report.records.float_format import renamed
from pyquant.report.records.record import record

Cells = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class SensitivityGroup:
    """name: of the group; layers: names of its layers; numel: weights; suspect: why it is often sensitive, or ''."""

    name: str
    layers: tuple[str, ...]
    numel: int
    suspect: str = ""


@dataclass(frozen=True)
class SensitivityCost:
    """What an analysis takes; a forward pass is one batch through the model.

    calibration_passes  forward passes that find the ranges of static formats.
    forward_passes      of the analysis; backward_passes: a pass back through a backward pass counts as two.
    evaluations         pieces of work that progress counts and a journal keeps.
    eval_calls          calls of the user's eval_fn.
    """

    calibration_passes: int
    forward_passes: int
    backward_passes: int
    evaluations: int
    eval_calls: int

    def line(self) -> str:
        """One line for people."""
        parts = [f"{self.evaluations} evaluations: {self.forward_passes} forward passes"]
        if self.backward_passes:
            parts.append(f"{self.backward_passes} backward passes")
        if self.eval_calls:
            parts.append(f"{self.eval_calls} calls of eval_fn")
        if self.calibration_passes:
            parts.append(f"{self.calibration_passes} forward passes before, to calibrate")
        return ", ".join(parts)


@dataclass(frozen=True)
class SensitivityStep:
    """One step of the cumulative mode: after `group` was lowered to `format`, with all groups before it.

    loss  measured, in step_unit of the report; task: the user's metric; latency_us: predicted by the latency table.
    """

    format: str
    group: str
    loss: float
    task: float | None = None
    latency_us: float | None = None


@dataclass(frozen=True)
class SensitivityTask:
    """The user's own metric at the configurations of the report's `loss`.

    baseline  of the float model; table, uniform: as in the report, None where it was not measured.
    """

    baseline: float
    higher_is_better: bool
    table: Cells
    uniform: tuple[float | None, ...]

    def drop(self, value: float) -> float:
        """How much worse than the float model a value is."""
        return self.baseline - value if self.higher_is_better else value - self.baseline


@dataclass(frozen=True)
class SensitivityLatency:
    """Predicted microseconds of the whole model, at the configurations of the report's `loss`.

    float_us  everything in floating point; table, uniform: as in the report.
    """

    float_us: float
    table: Cells
    uniform: tuple[float | None, ...]


@record("sensitivity", version=2, upgrades={1: renamed})
@dataclass(frozen=True)
class SensitivityReport:
    """The sensitivity of every group of layers to every format.

    model      class of the model; metric, mode: as given; unit: of `loss`.
    formats    names, the float one first, called by its dtype (fp32, fp32, bf16); groups: in the order of the model.
    loss       [groups][formats]. Modes 'one_at_a_time' and 'cumulative': the loss with this group alone lowered. Mode
               'leave_one_out': the loss with everything BUT this group lowered. None where a group refuses the format.
    additive   `loss` may be summed to predict what lowering several groups costs.
    uniform    [formats]: the loss with every group lowered, in step_unit; None where it was not measured. The float
               format has loss 0 here and in `loss`.
    steps      of the cumulative mode, format after format, the least sensitive group first; losses in step_unit.
    task       the user's metric, where an eval_fn was given.
    latency    predictions, where a latency table was given.
    refusals   what groups cannot take, and why.
    scored_on  the batches behind the losses, in words.
    environment  the machine and the versions.
    """

    model: str
    metric: str
    unit: str
    mode: str
    formats: tuple[str, ...]
    groups: tuple[SensitivityGroup, ...]
    loss: Cells
    additive: bool
    step_unit: str
    uniform: tuple[float | None, ...]
    steps: tuple[SensitivityStep, ...]
    task: SensitivityTask | None
    latency: SensitivityLatency | None
    refusals: tuple[str, ...]
    cost: SensitivityCost
    scored_on: str
    environment: dict[str, Any] = field(default_factory=dict)

    def cells(self) -> Iterator[tuple[int, int]]:
        """(group, format) of everything that was measured, by group."""
        for g, row in enumerate(self.loss):
            for f, value in enumerate(row):
                if f and value is not None:
                    yield g, f

    def sensitivity(self, group: int, format: int, by: str = "loss") -> float | None:
        """What this group alone costs in that format: the larger, the more it should stay in floating point.

        by  'loss', or 'task': the drop of the user's metric.
        ->  in `leave_one_out` how much better things get when the group is left out; None where it was not measured.
        """
        value = self._loss_by(by, group, format)
        if value is None or self.mode != "leave_one_out":
            return value
        whole = self._loss_by(by, None, format)
        return None if whole is None else whole - value

    def ranking(self, format: str | None = None, by: str = "loss") -> list[str]:
        """Names of the groups, the most sensitive first; groups that refuse the format are not in it.

        format  None: the last one.
        """
        f = self._format(format)
        scores = {g: s for g in range(len(self.groups)) if (s := self.sensitivity(g, f, by)) is not None}
        return [self.groups[g].name for g in sorted(scores, key=lambda g: (-scores[g], g))]

    def skip_list(self, max_drop: float, format: str | None = None, by: str = "loss") -> list[str]:
        """Names of the layers to keep in floating point so that lowering all others to one format costs little enough.

        max_drop  the most that the rest may cost: in the unit of `by`, which is 'loss' (such as nats a token) or
                  'task' (the absolute drop of the user's metric). With metric 'eval' the two are the same.
        format    what the others get; None: the last one.
        ->        layers in the order of the model, for SelectiveQuantizer.register_skip_quantization and for a
                  recipe's skip_modules. Groups that refuse the format are always among them.

        'cumulative': the longest measured run of steps that stays within max_drop. 'one_at_a_time' and
        'leave_one_out': predicted by summing single losses, so measure the result before you rely on it.
        Raises ArgumentError for a metric whose values are no losses ('error', 'cosine'), outside of 'cumulative'.

        Example:
            >>> from pyquant.report.records.sensitivity import SensitivityCost
            >>> groups = tuple(SensitivityGroup(name, (name,), 1) for name in ("a", "b", "c"))
            >>> loss = ((0.0, 0.25), (0.0, 3.0), (0.0, 0.5))
            >>> report = SensitivityReport("Net", "kl", "nats", "one_at_a_time", ("fp32", "int4"), groups, loss, True,
            ...                            "nats", (0.0, None), (), None, None, (), SensitivityCost(0, 0, 0, 0, 0), "")
            >>> report.ranking(), report.skip_list(1.0), report.skip_list(0.6)
            (['b', 'c', 'a'], ['b'], ['b', 'c'])
        """
        arguments.number("max_drop", max_drop, 0, infinite=True)
        f = self._format(format)
        lowered = self._by_steps(max_drop, f, by) if self.mode == "cumulative" else self._by_sums(max_drop, f, by)
        return [layer for group in self.groups if group.name not in lowered for layer in group.layers]

    def predicted_rest(self, format: str | None = None, by: str = "loss") -> tuple[list[str], list[float]]:
        """The ranking, and what lowering all others is predicted to cost when its first 0, 1, 2 ... are kept."""
        f, order = self._format(format), self.ranking(format, by)
        at = {group.name: g for g, group in enumerate(self.groups)}
        single = [self.sensitivity(at[name], f, by) or 0.0 for name in order]
        if self.mode == "leave_one_out":
            whole = self._loss_by(by, None, f) or 0.0
            return order, [whole - math.fsum(single[:k]) for k in range(len(order) + 1)]
        # apparent gains are noise and must not offset losses: they count as 0
        return order, [math.fsum(max(0.0, s) for s in single[k:]) for k in range(len(order) + 1)]

    @property
    def usual_suspects(self) -> dict[str, str]:
        """{group: why} of those that are sensitive in many models, before anything is measured."""
        return {group.name: group.suspect for group in self.groups if group.suspect}

    def _by_steps(self, max_drop: float, format: int, by: str) -> set[str]:
        self._check_by(by)
        steps = [step for step in self.steps if step.format == self.formats[format]]
        drops = [step.loss if by == "loss" else self.drop(step.task) for step in steps]
        within = [i + 1 for i, drop in enumerate(drops) if drop is not None and drop <= max_drop]
        return {step.group for step in steps[: max(within, default=0)]}

    def _by_sums(self, max_drop: float, format: int, by: str) -> set[str]:
        if by == "loss" and not self.additive:
            allowed = "a metric that predicts losses ('kl', 'fisher', 'eval', ...), or mode 'cumulative'"
            raise ArgumentError("metric", f"{self.metric!r} in mode {self.mode!r}", allowed)
        order, left = self.predicted_rest(self.formats[format], by)
        return set(order[next((k for k, loss in enumerate(left) if loss <= max_drop), len(order)) :])

    def _format(self, name: str | None) -> int:
        if name is None:
            return len(self.formats) - 1
        if name not in self.formats[1:]:
            raise ArgumentError("format", repr(name), ", ".join(map(repr, self.formats[1:])))
        return self.formats.index(name)

    def _loss_by(self, by: str, group: int | None, format: int) -> float | None:
        """The entry of a group, None: of all of them, in the loss or in the drop of the user's metric."""
        self._check_by(by)
        of = self.task if by == "task" and self.task is not None else None
        losses, whole = (self.loss, self.uniform) if of is None else (of.table, of.uniform)
        value = (whole if group is None else losses[group])[format]
        return value if of is None else self.drop(value)

    def _check_by(self, by: str) -> None:
        if by not in ("loss", "task") or (by == "task" and self.task is None):
            raise ArgumentError("by", repr(by), "'loss'" if self.task is None else "'loss' or 'task'")

    def drop(self, value: float | None) -> float | None:
        """How much worse than the float model a value of the user's metric is; None where there is none."""
        return None if value is None or self.task is None else self.task.drop(value)
