"""Trains small models, quantises them in many ways, prints what that costs against the stated goals, writes results."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.accuracy.goals import recovered, verdicts
from bench.accuracy.measure import QUICK, Figures, SeedResult, Size, gathered, measure
from bench.accuracy.models import TASKS
from bench.accuracy.records import AccuracyReport, AccuracyRow, goals_table, markdown, recovered_table, rows_table
from bench.markers import put
from bench.shared import folder_name
from pyquant.cli.progress import ProgressBar
from pyquant.io.journal import Journal
from pyquant.measure.environment import describe_environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

_SEEDS = {"digits": 5, "bytemlp": 3, "gpt3": 3}
_NOTES = [
    (
        "rise and accuracy are against the float model of the same seed, on the same held-out data; the interval is "
        "that of the mean over the seeds (Student's t)"
    ),
    "digits: 64-16-16-10 on scikit-learn's images with fresh noise; bytemlp, gpt3: the standard library's sources",
    "W4: weights alone, per channel; A4, A8: inputs alone, per tensor; scales by MSE where nothing is said; W8 by max",
    (
        "QAT: a tenth of the float schedule, from the calibrated model; the share recovered is that of the rise over "
        "the float control, which was trained as long in the same way, teacher and optimiser included"
    ),
]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--out", metavar="DIR", help="where results go (default: bench/results/<cpu>)")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds a task (default: 5 of digits, 3 of the others)")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--docs", metavar="FILE", help="also put the tables between the markers of this Markdown file")
    parser.add_argument("--keep", metavar="FILE", help="keep each finished seed here: a run that was stopped goes on")
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the training, lower goals: a check")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    tasks, notes = list(args.tasks), list(_NOTES)
    if "digits" in tasks and importlib.util.find_spec("sklearn") is None:
        tasks.remove("digits")
        notes.append("digits: not measured, scikit-learn is not installed")
        print(notes[-1], file=sys.stderr)
        if not tasks:
            return 2
    started = time.perf_counter()
    seeds = {task: args.seeds or (1 if args.quick else _SEEDS[task]) for task in tasks}
    # The longest first, so that the processes end together.
    jobs = [(task, seed) for task in sorted(tasks, key=list(TASKS).index, reverse=True) for seed in range(seeds[task])]
    results = sorted(
        _run(jobs, QUICK if args.quick else Size(), args.jobs, args.keep), key=lambda r: (tasks.index(r.task), r.seed)
    )
    by_task = gathered(results)
    report = AccuracyReport(
        environment=describe_environment("cpu", clock="none: nothing is timed"),
        seconds=time.perf_counter() - started,
        floats={task: [r.base for r in results if r.task == task] for task in tasks},
        goals=verdicts(by_task, args.quick),
        rows=[
            AccuracyRow(task, what, [f[what].rise for f in figures], [f[what].accuracy for f in figures])
            for task, figures in by_task.items()
            for what in figures[0]
        ],
        recovered=recovered(by_task),
        notes=notes,
    )
    print(goals_table(report.goals))
    out = Path(args.out) if args.out else Path("bench/results") / folder_name(report.environment)
    if args.out or not args.quick:
        write_text(out / "accuracy.md", markdown(report))
        save_record(out / "accuracy.json", figures_of(report))
        print(f"{report.seconds:.0f} s; wrote {out / 'accuracy.md'}, {out / 'accuracy.json'}")
    if args.docs:
        put_tables(Path(args.docs), report)
    return 1 if any(goal.verdict == "MISS" for goal in report.goals) else 0


def put_tables(path: Path, report: AccuracyReport) -> None:
    """Goals, and the rows of every task that was measured, between the markers of a document."""
    put(path, "goals", f"{report.environment.line()}\n\n{goals_table(report.goals)}")
    if report.recovered:
        put(path, "recovered", recovered_table(report.recovered))
    for task in report.floats:
        put(path, task, rows_table([row for row in report.rows if row.task == task]))


def _run(jobs: list[tuple[str, int]], size: Size, processes: int, keep: str | None) -> list[SeedResult]:
    facts = {"command": "accuracy", "size": repr(size), "machine": describe_environment("cpu", clock="none").line()}
    with (
        Journal(keep, "accuracy of seeds", facts) if keep else nullcontext() as journal,
        ProgressBar("accuracy", len(jobs)) as shown,
    ):
        found = [
            _unpacked(*job, journal.entries[_key(*job)]) for job in jobs if journal and _key(*job) in journal.entries
        ]
        finished = {(result.task, result.seed) for result in found}
        for task, seed in finished:
            shown.step(f"{task}, seed {seed}: kept")
        for result in _measured([job for job in jobs if job not in finished], size, processes):
            shown.step(f"{result.task}, seed {result.seed}")
            found.append(result)
            if journal:
                journal.add(_key(result.task, result.seed), _packed(result))
    return found


def _measured(jobs: Sequence[tuple[str, int]], size: Size, processes: int) -> Iterator[SeedResult]:
    """Each as soon as it is finished."""
    if processes <= 1 or len(jobs) <= 1:
        for task, seed in jobs:
            yield measure(task, seed, size)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(measure, *job, size) for job in jobs]):
            yield future.result()


def _key(task: str, seed: int) -> str:
    return f"{task} {seed}"


def _packed(result: SeedResult) -> dict[str, Any]:
    return {"base": result.base, "figures": {what: [f.rise, f.accuracy] for what, f in result.figures.items()}}


def _unpacked(task: str, seed: int, kept: dict[str, Any]) -> SeedResult:
    ce, accuracy = kept["base"]
    return SeedResult(task, seed, (ce, accuracy), {what: Figures(*pair) for what, pair in kept["figures"].items()})


if __name__ == "__main__":
    sys.exit(main())
