"""Plain records of a run: rows of (task, what was done, per seed), goals with verdicts, and their Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyquant.report.records.environment import Environment
from pyquant.report.render import table

# Student's t, two-sided 95 %, by degrees of freedom.
_T95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class AccuracyRow:
    """One way to quantise one task's model. A figure for each seed, in their order.

    rise      cross-entropy on held-out data minus that of the float model, in nats.
    accuracy  its accuracy minus that of the float model, in points.
    """

    task: str
    what: str
    rise: list[float]
    accuracy: list[float]


@dataclass(frozen=True)
class AccuracyGoal:
    """A stated goal and what was measured: a figure for each seed, their mean and its 95 % interval.

    verdict   'PASS': the whole interval meets the goal. 'pass': only the mean does. 'MISS': neither.
    """

    name: str
    direction: str
    goal: float
    stretch: float | None
    seeds: list[float]
    mean: float
    half_width: float
    verdict: str


@dataclass(frozen=True)
class Recovered:
    """The share of a scheme's rise that training took back, for each seed.

    of_control  of the rise over a float model that was trained as long with the same recipe.
    of_start    of the rise over the float model that training began with; also counts what training longer gives.
    """

    task: str
    scheme: str
    recipe: str
    of_control: list[float]
    of_start: list[float]


@dataclass(frozen=True)
class AccuracyReport:
    """Everything of one run. floats: {task: (cross-entropy, accuracy) of the float model for each seed}."""

    environment: Environment
    seconds: float
    floats: dict[str, list[tuple[float, float]]]
    goals: list[AccuracyGoal]
    rows: list[AccuracyRow]
    recovered: list[Recovered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval (infinite for one value)."""
    if len(values) < 2:
        return values[0], math.inf
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, _T95[min(len(values), len(_T95)) - 1] * math.sqrt(variance / len(values))


def judge(name: str, direction: str, goal: float, stretch: float | None, seeds: Sequence[float]) -> AccuracyGoal:
    """A goal with its verdict. NaN misses."""
    mean, half = interval(seeds)
    sign = 1.0 if direction == "<=" else -1.0
    if sign * mean + half <= sign * goal:
        verdict = "PASS"
    else:
        verdict = "pass" if sign * mean <= sign * goal else "MISS"
    return AccuracyGoal(name, direction, goal, stretch, list(seeds), mean, half, verdict)


def markdown(report: AccuracyReport) -> str:
    """The report for people."""
    parts = [
        "# Accuracy",
        report.environment.line(),
        f"Command: `{report.environment.command}`, {report.seconds:.0f} s",
    ]
    parts += ["## Float models", _floats(report.floats), "## Goals", goals_table(report.goals)]
    if report.recovered:
        parts += ["## Recovered by QAT", recovered_table(report.recovered)]
    for task in report.floats:
        parts += [f"## {task}", rows_table([row for row in report.rows if row.task == task])]
    if report.notes:
        parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def goals_table(goals: Sequence[AccuracyGoal]) -> str:
    """Goals against measurements."""
    header = ["goal", "limit", "stretch", "measured (95 % interval)", ""]
    return table(
        header,
        [
            [
                g.name,
                f"{g.direction} {g.goal:g}",
                "" if g.stretch is None else f"{g.direction} {g.stretch:g}",
                with_interval(g.seeds),
                g.verdict,
            ]
            for g in goals
        ],
    )


def rows_table(rows: Sequence[AccuracyRow]) -> str:
    """Rows of one task."""
    header = ["", "rise of the cross-entropy, nats", "accuracy, points"]
    return table(header, [[r.what, with_interval(r.rise), with_interval(r.accuracy, 2)] for r in rows])


def recovered_table(found: Sequence[Recovered]) -> str:
    """What every recipe recovers."""
    header = ["", "recipe", "of the rise over the float control", "of the rise over the float model"]
    return table(
        header,
        [
            [f"{r.task}, {r.scheme}", r.recipe, with_interval(r.of_control, 2), with_interval(r.of_start, 2)]
            for r in found
        ],
    )


def with_interval(values: Sequence[float], digits: int = 4) -> str:
    """'0.0123 ± 0.0004', or the figure alone where there is one seed."""
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def _floats(floats: dict[str, list[tuple[float, float]]]) -> str:
    return table(
        ["task", "seeds", "cross-entropy, nats", "accuracy, %"],
        [
            [task, len(pairs), with_interval([c for c, _ in pairs]), with_interval([a for _, a in pairs], 2)]
            for task, pairs in floats.items()
        ],
    )
