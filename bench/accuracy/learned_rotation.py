"""What a learned rotation of the residual stream does beside the Hadamard matrix it begins with: one table."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from bench.accuracy.measure import CALIBRATION, Rig, Size
from bench.accuracy.models import TASKS
from bench.accuracy.records import with_interval
from bench.accuracy.rotated import BEST, SPECS
from bench.accuracy.train import train_float
from bench.markers import put
from pyquant import W4A4Dynamic, gptq_, learn_rotation_, rotate_
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import using_threads
from pyquant.report.render import table

SCHEMES: Final = {"W4A4Dynamic": W4A4Dynamic(), "W4A4Dynamic, affine inputs": W4A4Dynamic(symmetric_inputs=False)}
WAYS: Final = ("as trained", "Hadamard", "learned")
HOW: Final = ("rounding", "gptq")
# {(scheme, way, how): rise of the cross-entropy}, and {("", "accepted", scheme): 1 or 0}
Rises = dict[tuple[str, str, str], float]


@using_threads(1)  # as in measure.py: training that comes out again
def measure(seed: int, size: Size) -> Rises:
    """Everything of one seed: of training, calibration data, signs and the order of batches."""
    task = TASKS["gpt3"]
    rig = Rig(task, seed, size, train_float(task, seed, size.share))
    found: Rises = {}
    for name, scheme in SCHEMES.items():
        for way in WAYS:
            model = copy.deepcopy(rig.model)
            if way == "Hadamard":
                rotate_(model, rig.calibration[0][0], SPECS[BEST], seed=seed)
            elif way == "learned":
                config = {"_default": scheme, **dict.fromkeys(task.left_alone)}
                learned = learn_rotation_(model, config, rig.calibration, CALIBRATION, SPECS[BEST], seed=seed)
                found["", "accepted", name] = float(learned.accepted)
            rounded = rig.simulated(scheme, of=model)
            found[name, way, "rounding"] = rig.judge(rounded)[0] - rig.base[0]
            gptq_(rounded, rig.calibration, CALIBRATION)
            found[name, way, "gptq"] = rig.judge(rounded)[0] - rig.base[0]
    return found


def tables(seeds: Sequence[Rises]) -> str:
    """A line for each scheme and way; the learned matrices that held-out batches preferred, of all."""
    lines = []
    for name in SCHEMES:
        for way in WAYS:
            cells = [with_interval([rises[name, way, how] for rises in seeds]) for how in HOW]
            taken = sum(int(rises["", "accepted", name]) for rises in seeds)
            lines.append([f"{name}, {way}", *cells, f"{taken} of {len(seeds)}" if way == "learned" else ""])
    return table(["", *HOW, "accepted"], lines)


def main(argv: list[str] | None = None, size: Size | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy.learned_rotation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--docs", metavar="FILE", help="put the table between the markers of this Markdown file")
    args = parser.parse_args(argv)
    given = [size or Size()] * args.seeds
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(measure, range(args.seeds), given))
    else:
        found = [measure(seed, size) for seed, size in enumerate(given)]
    machine = describe_environment("cpu", clock="none: nothing is timed").line()
    print(shown := f"{machine}\n\n{tables(found)}")
    if args.docs:
        put(Path(args.docs), "learned_rotation", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
