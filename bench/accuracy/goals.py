"""The goals of the project's accuracy, and what a run says about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.accuracy.measure import BEST, RECIPES, Figures
from bench.accuracy.records import AccuracyGoal, Recovered, judge

_TASK_WORDS = {"digits": "digits", "bytemlp": "byte MLP", "gpt3": "byte transformer"}


@dataclass(frozen=True)
class Goal:
    """of: figures of one seed -> the number that is judged. quick: the lower bar of a run with --quick."""

    name: str
    tasks: tuple[str, ...]
    direction: str
    goal: float
    stretch: float | None
    quick: float
    of: Callable[[Mapping[str, Figures]], float]


def _ratio(above: str, below: str) -> Callable[[Mapping[str, Figures]], float]:
    return lambda f: f[above].rise / max(f[below].rise, 1e-9)


def _rise(what: str) -> Callable[[Mapping[str, Figures]], float]:
    return lambda f: f[what].rise


def _recovered(scheme: str, recipe: str, of: str = "control") -> Callable[[Mapping[str, Figures]], float]:
    """The share of a rise that training took back: over the float control, trained as long with the same recipe, or
    (of="start") over the float model that all began with."""

    def share(f: Mapping[str, Figures]) -> float:
        floor = f[f"float control, {recipe}"].rise if of == "control" else 0.0
        return (f[scheme].rise - f[f"{scheme}, QAT {recipe}"].rise) / max(f[scheme].rise - floor, 1e-9)

    return share


_BOTH = ("bytemlp", "gpt3")
GOALS = (
    Goal("W8A8: rise of the cross-entropy", ("digits", *_BOTH), "<=", 0.005, None, 0.02, _rise("W8A8")),
    Goal("W8A8: accuracy lost, points", ("digits", *_BOTH), "<=", 0.5, None, 2.0, lambda f: -f["W8A8"].accuracy),
    Goal("W4: rise with GPTQ / with rounding (MSE)", _BOTH, "<=", 0.80, 0.55, 1.0, _ratio("W4 GPTQ", "W4 MSE")),
    Goal("A4: rise affine / signed", _BOTH, "<=", 0.85, 0.6, 1.1, _ratio("A4 affine", "A4 signed")),
    Goal("A8 by entropy on half-zero data: rise", ("digits", "bytemlp"), "<=", 0.01, None, 0.03, _rise("A8 entropy")),
    Goal("outliers, W8A8 after smoothing: rise", ("gpt3",), "<=", 0.01, None, 0.05, _rise("outliers, W8A8 smoothed")),
    Goal("W4A8: share that QAT recovers", _BOTH, ">=", 0.60, 0.80, 0.1, _recovered("W4A8", BEST)),
    Goal("W4A4 affine: share that QAT recovers", _BOTH, ">=", 0.55, None, 0.1, _recovered("W4A4 affine", BEST)),
)


def verdicts(seeds: Mapping[str, list[Mapping[str, Figures]]], quick: bool) -> list[AccuracyGoal]:
    """Every goal for every task that was measured. seeds: {task: the figures of each seed}."""
    found = []
    for goal in GOALS:
        for task in goal.tasks:
            if seeds.get(task):
                limit = goal.quick if quick else goal.goal
                values = [goal.of(figures) for figures in seeds[task]]
                name = f"{goal.name} ({_TASK_WORDS[task]})"
                found.append(judge(name, goal.direction, limit, None if quick else goal.stretch, values))
    return found


def recovered(seeds: Mapping[str, list[Mapping[str, Figures]]]) -> list[Recovered]:
    """The share that every recipe recovers, by both measures. seeds: {task: the figures of each seed}."""
    return [
        Recovered(task, scheme, recipe, *([_recovered(scheme, recipe, of)(f) for f in figures] for of in _MEASURES))
        for task, figures in seeds.items()
        for scheme in ("W4A8", "W4A4 affine")
        for recipe in (*RECIPES, BEST)
        if f"{scheme}, QAT {recipe}" in figures[0]
    ]


_MEASURES = ("control", "start")
