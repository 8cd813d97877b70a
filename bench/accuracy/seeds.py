"""What the drivers of one table have in common: tasks and seeds in processes, the table shown and put into a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from bench.accuracy.measure import Size
from bench.markers import put
from pyquant.measure.environment import describe_environment

Found = TypeVar("Found")


def run(
    name: str,
    what: str | None,
    tasks: Sequence[str],
    measure: Callable[[str, int, Size], Found],
    tables: Callable[[dict[str, Sequence[Found]]], str],
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
    args = parser.parse_args(argv)
    given = [(task, seed, size or Size()) for task in tasks for seed in range(args.seeds)]
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(measure, *zip(*given, strict=True)))
    else:
        found = [measure(*one) for one in given]
    by_task = {task: found[i * args.seeds : (i + 1) * args.seeds] for i, task in enumerate(tasks)}
    machine = describe_environment("cpu", clock="none: nothing is timed").line()
    print(shown := f"{machine}\n\n{tables(by_task)}")
    if args.docs:
        put(Path(args.docs), name, shown)
    return 1 if "MISS" in shown else 0
