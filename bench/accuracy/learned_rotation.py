"""What a learned rotation of the residual stream does beside the Hadamard matrix it begins with: one table."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Final

from bench.accuracy.measure import CALIBRATION, Rig, Size
from bench.accuracy.models import TASKS
from bench.accuracy.records import with_interval
from bench.accuracy.rotated import BEST, SPECS
from bench.accuracy.seeds import run
from bench.accuracy.train import train_float
from pyquant import W4A4Dynamic, gptq_, learn_rotation_, rotate_
from pyquant.measure.timing import using_threads
from pyquant.report.render import table

SCHEMES: Final = {"W4A4Dynamic": W4A4Dynamic(), "W4A4Dynamic, affine inputs": W4A4Dynamic(symmetric_inputs=False)}
WAYS: Final = ("as trained", "Hadamard", "learned")
HOW: Final = ("rounding", "gptq")
# {(scheme, way, how): rise of the cross-entropy}, and {("", "accepted", scheme): 1 or 0}
Rises = dict[tuple[str, str, str], float]


@using_threads(1)  # as in measure.py: training that comes out again
def measure(name: str, seed: int, size: Size) -> Rises:
    """Everything of one seed: of training, calibration data, signs and the order of batches."""
    task = TASKS[name]
    rig = Rig(task, seed, size, train_float(task, seed, size.share))
    found: Rises = {}
    for what, scheme in SCHEMES.items():
        for way in WAYS:
            model = copy.deepcopy(rig.model)
            if way == "Hadamard":
                rotate_(model, rig.calibration[0][0], SPECS[BEST], seed=seed)
            elif way == "learned":
                config = {"_default": scheme, **dict.fromkeys(task.left_alone)}
                learned = learn_rotation_(model, config, rig.calibration, CALIBRATION, SPECS[BEST], seed=seed)
                found["", "accepted", what] = float(learned.accepted)
            rounded = rig.simulated(scheme, of=model)
            found[what, way, "rounding"] = rig.judge(rounded)[0] - rig.base[0]
            gptq_(rounded, rig.calibration, CALIBRATION)
            found[what, way, "gptq"] = rig.judge(rounded)[0] - rig.base[0]
    return found


def tables(found: dict[str, Sequence[Rises]]) -> str:
    """A line for each scheme and way; the learned matrices that held-out batches preferred, of all."""
    (seeds,) = found.values()
    lines = []
    for what in SCHEMES:
        for way in WAYS:
            cells = [with_interval([rises[what, way, how] for rises in seeds]) for how in HOW]
            taken = sum(int(rises["", "accepted", what]) for rises in seeds)
            lines.append([f"{what}, {way}", *cells, f"{taken} of {len(seeds)}" if way == "learned" else ""])
    return table(["", *HOW, "accepted"], lines)


def main(argv: list[str] | None = None, size: Size | None = None) -> int:
    return run("learned_rotation", __doc__, ("gpt3",), measure, tables, argv, size)


if __name__ == "__main__":
    sys.exit(main())
