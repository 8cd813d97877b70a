"""What the drivers of one table have in common: tasks and seeds in processes, the table shown and put into a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.accuracy.measure import Size
from bench.markers import get, put
from pyquant.io.journal import Journal
from pyquant.measure.environment import describe_environment

Rises = dict[Any, Any]  # {tuple of texts: a number, or a tuple of numbers}
Measure = Callable[[str, int, Size], Rises]
Job = tuple[str, int]  # task and seed


def run(
    name: str,
    what: str | None,
    tasks: Sequence[str],
    measure: Measure,
    tables: Callable[[dict[str, Sequence[Any]]], str],
    argv: list[str] | None,
    size: Size | None,
) -> int:
    """The command `python -m bench.accuracy.<name>`, whose markers in a page are called the same.

    measure   (task, seed, size) -> everything of one task and seed; a function of a module, for other processes.
    tables    {task: what was found by each seed} -> Markdown.
    ->        1 where a goal of the tables is missed, otherwise 0.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.accuracy.{name}", description=what)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--docs", metavar="FILE", help="put the tables between the markers of this Markdown file")
    parser.add_argument("--keep", metavar="FILE", help="keep each finished seed here: a run that was stopped goes on")
    args = parser.parse_args(argv)
    if args.docs:
        get(Path(args.docs), name)  # what is wrong with the page is told before hours of work
    size = size or Size()
    machine = describe_environment("cpu", clock="none: nothing is timed").line()
    jobs = [(task, seed) for task in tasks for seed in range(args.seeds)]
    found: dict[Job, Rises] = {}
    with ExitStack() as last:
        journal = None
        if args.keep:
            facts = {"command": name, "size": repr(size), "machine": machine}
            journal = last.enter_context(Journal(args.keep, "accuracy of seeds", facts))
            found = {job: _unpacked(journal.entries[_key(job)]) for job in jobs if _key(job) in journal.entries}
        for job, rises in _measured(measure, [job for job in jobs if job not in found], size, args.jobs):
            found[job] = rises
            if journal is not None:
                journal.add(_key(job), _packed(rises))
    by_task = {task: [found[task, seed] for seed in range(args.seeds)] for task in tasks}
    print(shown := f"{machine}\n\n{tables(by_task)}")
    if args.docs:
        put(Path(args.docs), name, shown)
    return 1 if "MISS" in shown else 0


def _measured(measure: Measure, jobs: Sequence[Job], size: Size, processes: int) -> Iterator[tuple[Job, Rises]]:
    """Each as soon as it is finished."""
    if processes <= 1:
        for job in jobs:
            yield job, measure(*job, size)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(measure, *job, size): job for job in jobs}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def _key(job: Job) -> str:
    return f"{job[0]} {job[1]}"


def _packed(rises: Rises) -> list[Any]:
    return [[list(key), list(value) if isinstance(value, tuple) else value] for key, value in rises.items()]


def _unpacked(entries: list[Any]) -> Rises:
    return {tuple(key): tuple(value) if isinstance(value, list) else value for key, value in entries}
