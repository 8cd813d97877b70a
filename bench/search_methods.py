"""The search methods side by side: hypervolume after 12, 20, 25 and 40 evaluations, relative to the best front known.

python -m bench.search_methods [--out results.md] [--quick]

Truth: the tables of bench.search_tables (48 problems of 729 configurations, all of them measured), the same with
made-up interactions between groups, and three nets of twelve layers (531 441 configurations), whose best front is that
of everything that any method or a local search from all of them has seen. The corner is the float configuration's cost
and 30 % of the loss of all groups in int4; in three tables all of it, and a search told of no corner is judged by both.
The losses of one group at a time, the problem's table, are not counted. The last table is of tolerances: how much
dearer than the cheapest of all the configurations is that a search with a limit on a metric gives.
Minutes; --quick: every sixth table, one net.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.search_cases import (
    Case,
    TwelveLayers,
    excess_within,
    interacting,
    polished,
    table_cases,
    with_whole_front,
)
from pyquant.io.atomic import write_file
from pyquant.mixed_precision.solve import Config, exact_front, search_front
from pyquant.mixed_precision.solve.acquire import Stairs
from pyquant.mixed_precision.solve.problem import SearchProblem
from pyquant.report.records.pareto import hypervolume

COUNTS: Final = (12, 20, 25, 40)
BUDGET: Final = COUNTS[-1]
TOLERANCES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9)
EVALUATIONS: Final = 12  # of the metric, as pyquant.search has them
RNG_SEEDS: Final = 3  # of the methods that draw: all of them count

Method = Callable[[Case], list[list[Config]]]


def _found(case: Case, **options: Any) -> list[Config]:
    return [p.config for p in search_front(case.problem, case.evaluate, BUDGET, **options)]


def dp_refit(case: Case) -> list[list[Config]]:
    """As users get it; it ends by itself, so the last columns repeat what it had by then."""
    return [_found(case, corner=case.corner)]


def dp_refit_all(case: Case) -> list[list[Config]]:
    return [_found(case, corner=case.corner, stop_gain=0.0)]


def dp_batches(case: Case) -> list[list[Config]]:
    return [_found(case, corner=case.corner, batch=4)]


def dp_only(case: Case) -> list[list[Config]]:
    """The exact front of the tables, in the order of the gain that they predict; nothing is learned."""
    pool = exact_front(case.problem)
    stairs, chosen = Stairs([], case.corner), []
    while pool and len(chosen) < BUDGET:
        gains = stairs.gains(np.array([c.cost for c in pool]), np.array([[c.loss] for c in pool]))[:, 0]
        best = pool.pop(int(np.argmax(gains)))
        stairs = stairs.adding((best.cost, best.loss))
        chosen.append(best.config)
    return [chosen]


def greedy(case: Case) -> list[list[Config]]:
    return [_found(case, algorithm="greedy")]


def bisection(case: Case) -> list[list[Config]]:
    return [_found(case, algorithm="bisection")]


def nsga2(case: Case) -> list[list[Config]]:
    return [_found(case, algorithm="nsga2", rng_seed=seed) for seed in range(RNG_SEEDS)]


def drawn(case: Case) -> list[list[Config]]:
    shape = case.problem.loss.shape
    rngs = [np.random.default_rng(seed) for seed in range(RNG_SEEDS)]
    return [[tuple(c) for c in rng.integers(0, shape[1], (BUDGET, shape[0])).tolist()] for rng in rngs]


def uniform(case: Case) -> list[list[Config]]:
    return [[case.problem.uniform(f) for f in range(len(case.problem.formats))]]


def untold(case: Case) -> list[list[Config]]:
    """As users get it without limits on the loss: the search chooses its corners itself."""
    return [_found(case)]


METHODS: Final[dict[str, Method]] = {
    "DP + refit (the default)": dp_refit,
    "DP + refit, whole budget": dp_refit_all,
    "DP + refit, batches of 4": dp_batches,
    "DP on the tables, no refit": dp_only,
    "greedy path": greedy,
    "bisection, 8 limits": bisection,
    "NSGA-II (pymoo, population 20)": nsga2,
    "random": drawn,
    "uniform": uniform,
}


def twelve_layers(seed: int, methods: dict[str, Method], share: float = 0.3) -> Case:
    """The net as a case; its best front is found by everybody together and a local search. share: of the loss of all
    groups in int4, at the corner."""
    net = TwelveLayers(seed)
    problem = net.problem()
    corner = (problem.cost_of(problem.uniform(0)), share * net.evaluate(problem.uniform(2)))
    case = Case("twelve", problem, net.evaluate, corner, 1.0)
    seen = {c for method in methods.values() for run in method(case) for c in run}
    return Case("twelve", problem, net.evaluate, corner, _best(problem, case, sorted(seen)))


def _best(problem: SearchProblem, case: Case, seen: list[Config]) -> float:
    front = polished(problem, case.evaluate, seen)
    return hypervolume([(problem.cost_of(c), case.evaluate(c)) for c in front], case.corner)


def ratios(case: Case, method: Method) -> tuple[list[list[float]], int]:
    """-> (hypervolume ratios [runs][COUNTS], the most evaluations that a run took)."""
    runs = method(case)
    points = [[(case.problem.cost_of(c), case.evaluate(c)) for c in run] for run in runs]
    return [[hypervolume(p[:n], case.corner) / case.best for n in COUNTS] for p in points], max(map(len, runs))


def table(title: str, cases: list[Case], methods: dict[str, Method]) -> str:
    """Markdown: mean / worst of each method over the cases."""
    lines = [f"### {title}", "", f"| method | evaluations | {' | '.join(f'HV at {n}' for n in COUNTS)} |"]
    lines.append("|---|---|" + "---|" * len(COUNTS))
    for name, method in methods.items():
        found = [ratios(case, method) for case in cases]
        values = np.array([run for runs, _ in found for run in runs])
        taken = [count for _, count in found]
        cells = [f"{m:.4f} / {w:.4f}" for m, w in zip(values.mean(axis=0), values.min(axis=0), strict=True)]
        lines.append(f"| {name} | {min(taken)}–{max(taken)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def tolerance_table(cases: list[Case]) -> str:
    """Markdown: mean / worst factor by which what is found within a tolerance is dearer than the cheapest of all."""
    lines = ["### the cheapest within a tolerance", "", "| tolerance, of the loss of all groups in int4 | dearer by |"]
    lines.append("|---|---|")
    for share in TOLERANCES:
        found = np.array([excess_within(case, share, BUDGET, EVALUATIONS) for case in cases]) - 1
        over = int((found > 0.01).sum())
        lines.append(f"| {share:.0%} | {found.mean():.2%} / {found.max():.2%}, {over} of {len(cases)} above 1 % |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    methods = dict(METHODS)
    parts = ["Hypervolume ratio, mean / worst. `python -m bench.search_methods`", ""]
    if importlib.util.find_spec("pymoo") is None:
        methods = {name: m for name, m in methods.items() if m is not nsga2}
        parts += ["NSGA-II is missing here: pymoo is not installed.", ""]
    cases = list(table_cases())[:: 6 if options.quick else 1]
    for model in ("digits", "bytemlp", "gpt3", "gpt3x"):
        some = [c for c in cases if c.name.startswith(model + ".")]
        parts.append(table(f"{model}: {len(some)} problems of 729 configurations", some, methods))
    parts.append(table(f"all: {len(cases)} problems", cases, methods))
    search = {"DP + refit, told of no corner": untold}
    parts.append(table("the same, corners of its own", cases, search))
    whole = [with_whole_front(case) for case in cases]
    parts.append(table("the whole front: the corner at 100 % of the loss of all groups in int4", whole, search))
    for adjacent, far in ((2.0, 0.0), (1.5, 1.0)):
        some = [interacting(c, adjacent, far, i) for i, c in enumerate(cases[:: 1 if options.quick else 4])]
        text = f"made-up interactions, up to {adjacent:.0%} of neighbours and {far:.0%} of others: {len(some)} problems"
        parts.append(table(text, some, methods))
    nets = [twelve_layers(seed, methods) for seed in range(1 if options.quick else 3)]
    parts.append(table(f"twelve layers: {len(nets)} nets of 531 441 configurations", nets, methods))
    nets = [twelve_layers(net, {**methods, **search}, 1.0) for net in range(len(nets))]
    parts.append(table("twelve layers: the corner at 100 % of the loss of all groups in int4", nets, search))
    parts.append(tolerance_table(cases))
    text = "\n".join(parts)
    print(text)
    if options.out is not None:
        write_file(options.out, text.encode())


if __name__ == "__main__":
    main()
