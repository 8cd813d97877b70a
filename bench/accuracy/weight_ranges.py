"""Ranges of 4-bit weights by their maximum and by the mean squared error, rounded and by GPTQ: one table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from bench.accuracy.measure import CALIBRATION, Rig, Size
from bench.accuracy.models import TASKS
from bench.accuracy.records import with_interval
from bench.accuracy.seeds import run
from bench.accuracy.train import train_float
from pyquant import W4A16, W4A8TwoLevel, gptq_
from pyquant.measure.timing import using_threads
from pyquant.report.render import table

SCHEMES: Final = {
    "a scale a channel": W4A16(None),
    "groups of 32": W4A16(32),
    "groups of 32, affine": W4A16(32, symmetric=False),
    "groups of 32, two levels, 8-bit inputs": W4A8TwoLevel(32),
}
NAMES: Final = ("bytemlp", "gpt3")
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
    return run("weight_ranges", __doc__, NAMES, measure, tables, argv, size)


if __name__ == "__main__":
    sys.exit(main())
