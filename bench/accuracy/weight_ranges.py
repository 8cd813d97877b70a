"""Ranges of 4-bit weights by their maximum and by the mean squared error, rounded and by GPTQ: one table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from bench.accuracy.measure import CALIBRATION, Rig, Size
from bench.accuracy.models import TASKS
from bench.accuracy.records import with_interval
from bench.accuracy.train import train_float
from bench.markers import put
from pyquant import W4A16, W4A8TwoLevel, gptq_
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import using_threads
from pyquant.report.render import table

SCHEMES: Final = {
    "a scale a channel": W4A16(None),
    "groups of 32": W4A16(32),
    "groups of 32, affine": W4A16(32, symmetric=False),
    "groups of 32, two levels, 8-bit inputs": W4A8TwoLevel(32),
}
TASKS_MEASURED: Final = ("bytemlp", "gpt3")
METHODS: Final = ("max", "mse")
Rises = dict[tuple[str, str, str], float]  # {(scheme, calibrator, 'rounding' or 'gptq'): rise of the cross-entropy}


@using_threads(1)  # as in measure.py: training that comes out again
def measure(name: str, seed: int, size: Size) -> Rises:
    """Everything of one task and seed: of training and calibration data."""
    task = TASKS[name]
    rig = Rig(task, seed, size, train_float(task, seed, size.share))
    found: Rises = {}
    for what in SCHEMES:
        for method in METHODS:
            rounded = rig.simulated(SCHEMES[what], method)
            found[what, method, "rounding"] = rig.judge(rounded)[0] - rig.base[0]
            gptq_(rounded, rig.calibration, CALIBRATION)
            found[what, method, "gptq"] = rig.judge(rounded)[0] - rig.base[0]
    return found


def tables(found: dict[str, Sequence[Rises]]) -> str:
    """A line for each task and scheme; the last column is how much less the second calibrator costs, seed by seed."""
    lines = []
    for name, seeds in found.items():
        for what in SCHEMES:
            for how in ("rounding", "gptq"):
                by = [[rises[what, method, how] for rises in seeds] for method in METHODS]
                gains = [a - b for a, b in zip(*by, strict=True)]
                lines.append([f"{name}, {what}", how, *map(with_interval, by), with_interval(gains)])
    return table(["weights", "codes by", "max", "mse", "max - mse"], lines)


def main(argv: list[str] | None = None, size: Size | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy.weight_ranges", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--docs", metavar="FILE", help="put the table between the markers of this Markdown file")
    args = parser.parse_args(argv)
    names = [name for name in TASKS_MEASURED for _ in range(args.seeds)]
    given = (names, [*range(args.seeds)] * len(TASKS_MEASURED), [size or Size()] * len(names))
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            rises = list(pool.map(measure, *given))
    else:
        rises = [measure(*one) for one in zip(*given, strict=True)]
    found = {name: rises[i * args.seeds : (i + 1) * args.seeds] for i, name in enumerate(TASKS_MEASURED)}
    machine = describe_environment("cpu", clock="none: nothing is timed").line()
    print(shown := f"{machine}\n\n{tables(found)}")
    if args.docs:
        put(Path(args.docs), "weight_ranges", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
