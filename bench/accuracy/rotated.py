"""What rotation does for a transformer in 4 bits, alone, with smoothing and with GPTQ: one table, and goals."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from torch import nn

from bench.accuracy.measure import CALIBRATION, Rig, Size, inject_outliers
from bench.accuracy.models import HEADS, TASKS, WIDTH
from bench.accuracy.records import goals_table, judge
from bench.accuracy.seeds import run
from bench.accuracy.train import train_float
from pyquant import W4A4, W4A8, W4A16, RotatedHeads, RotationSpec, gptq_, rotate_, smooth_
from pyquant.measure.timing import using_threads
from pyquant.report.render import table

GAIN: Final = 12.0  # of the outliers
SCHEMES: Final = {
    "W4A16": W4A16(None),
    "W4A8": W4A8(None),
    "W4A4 signed": W4A4(),
    "W4A4 affine": W4A4(symmetric_inputs=False),
}
# The residual stream and the values of attention of ByteTransformer, and what only a transform at run time can turn.
FOLDED: Final = RotationSpec(
    writers=["embed", "place", "blocks.*.out", "blocks.*.fc2"],
    readers={"blocks.*.norm1": ["blocks.*.qkv"], "blocks.*.norm2": ["blocks.*.fc1"], "norm": ["head"]},
    heads=[RotatedHeads("blocks.*.qkv", "blocks.*.out", WIDTH // HEADS, (2 * WIDTH, 3 * WIDTH))],
)
SPECS: Final = {
    "rotated": FOLDED,
    "rotated, online in fc2": replace(FOLDED, online=["blocks.*.fc2"]),
    "rotated, online in fc2 and out": replace(FOLDED, online=["blocks.*.fc2", "blocks.*.out"]),
}
BEST: Final = "rotated, online in fc2 and out"
WAYS: Final = ("as trained", "smoothed", *SPECS, f"smoothed, {BEST}")
AFFINE: Final = "W4A4 affine"
# (way, scheme, 1 with GPTQ or 0 without, limit, stretch): the latter two of nats above the float model
GOALS: Final = (
    ("rotated", "W4A16", 1, 0.018, 0.017),
    ("rotated", "W4A8", 1, 0.025, None),
    (BEST, "W4A4 signed", 1, 0.115, 0.107),
    (BEST, AFFINE, 1, 0.085, 0.077),
    (f"outliers, {BEST}", AFFINE, 1, 0.085, 0.075),
)
Rises = dict[tuple[str, str], tuple[float, float]]  # {(way, scheme): rise of the cross-entropy rounded, and by GPTQ}


@using_threads(1)  # as in measure.py: training that comes out again
def measure(name: str, seed: int, size: Size) -> Rises:
    """Everything of one seed: of training, calibration data and signs."""
    task = TASKS[name]
    rig = Rig(task, seed, size, train_float(task, seed, size.share))
    found: Rises = {}
    for way in WAYS:
        model = _changed(rig, way, rig.model)
        found |= {(way, scheme): _rises(rig, model, scheme) for scheme in SCHEMES}
    outliers = inject_outliers(copy.deepcopy(rig.model), GAIN)
    for way in ("as trained", "smoothed", BEST):
        found[f"outliers, {way}", AFFINE] = _rises(rig, _changed(rig, way, outliers), AFFINE)
    return found


def _changed(rig: Rig, way: str, of: nn.Module) -> nn.Module:
    """A copy of a float model in which the way's steps were taken."""
    model = copy.deepcopy(of)
    if way.startswith("smoothed"):
        smooth_(model, rig.calibration, CALIBRATION)
    spec = SPECS.get(way.removeprefix("smoothed, "))
    if spec is not None:
        rotate_(model, rig.calibration[0][0], spec, seed=rig.seed)
    return model


def _rises(rig: Rig, model: nn.Module, scheme: str) -> tuple[float, float]:
    rounded = rig.simulated(SCHEMES[scheme], of=model)
    by_rounding = rig.judge(rounded)[0] - rig.base[0]
    gptq_(rounded, rig.calibration, CALIBRATION)
    return by_rounding, rig.judge(rounded)[0] - rig.base[0]


def tables(found: dict[str, Sequence[Rises]]) -> str:
    """Means of all seeds, and the goals with their intervals."""
    (seeds,) = found.values()

    def cell(way: str, scheme: str) -> str:
        if (way, scheme) not in seeds[0]:
            return ""
        return " / ".join(f"{fmean(rises[way, scheme][i] for rises in seeds):.4f}" for i in (0, 1))

    ways = dict.fromkeys(way for way, _ in seeds[0])
    shown = table(["", *SCHEMES], [[way, *(cell(way, scheme) for scheme in SCHEMES)] for way in ways])
    goals = [
        judge(f"{scheme}, {way}", "<=", limit, stretch, [rises[way, scheme][i] for rises in seeds])
        for way, scheme, i, limit, stretch in GOALS
    ]
    return f"{shown}\n\n{goals_table(goals)}"


def main(argv: list[str] | None = None, size: Size | None = None) -> int:
    return run("rotated", __doc__, ("gpt3",), measure, tables, argv, size)


if __name__ == "__main__":
    sys.exit(main())
