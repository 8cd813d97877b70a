"""What reconstruction does for 4 bits: plain GPTQ, corrected targets, block by block, with smoothing and rotation."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from torch import nn

from bench.accuracy.measure import CALIBRATION, PLAIN, Rig, Size, inject_outliers
from bench.accuracy.models import TASKS
from bench.accuracy.records import goals_table, judge
from bench.accuracy.rotated import AFFINE, BEST, GAIN, SPECS
from bench.accuracy.seeds import run
from bench.accuracy.train import train_float
from pyquant import W4A4, W4A8, W4A16, gptq_, rotate_, smooth_
from pyquant.measure.timing import using_threads
from pyquant.report.render import table

SCHEMES: Final = {
    "W4A16": W4A16(None),
    "W4A8": W4A8(None),
    "W4A4 signed": W4A4(),
    AFFINE: W4A4(symmetric_inputs=False),
}
# what gptq_ is given; None: rounding alone. Each is judged by what its error says.
WAYS: Final[dict[str, dict[str, Any] | None]] = {
    "rounding": None,
    "GPTQ, 'mse' of the model": {**PLAIN, "error": "mse", "blocks": None},
    "GPTQ, 'kl' of the model": {**PLAIN, "error": "kl"},
    "GPTQ, both": {**PLAIN, "blocks": None},
    "order by held-out data, both": {"correct_targets": False, "blocks": None},
    "order and targets by held-out data, both": {"blocks": None},
    "block by block, GPTQ": PLAIN,
    "block by block, all targets corrected": {"correct_targets": True},
    "block by block, the default": {},
}
LARGE: Final = ("rounding", "GPTQ, 'kl' of the model", "order and targets by held-out data, both")  # of the transformer
DEFAULT: Final = "block by block, the default"
GOALS: Final = (  # (line, scheme, limit)
    (DEFAULT, "W4A16", 0.018),
    (DEFAULT, "W4A8", 0.025),
    (DEFAULT, "W4A4 signed", 0.115),
    (DEFAULT, AFFINE, 0.085),
    (f"{BEST}, {DEFAULT}", "W4A4 signed", 0.115),
    (f"{BEST}, {DEFAULT}", AFFINE, 0.085),
    (f"outliers, smoothed, {BEST}, {DEFAULT}", AFFINE, 0.085),
)
Rises = dict[tuple[str, str], float]  # {(line, scheme): rise of the cross-entropy}


@using_threads(1)  # as in measure.py: training that comes out again
def measure(name: str, seed: int, size: Size) -> Rises:
    """Everything of one seed: of training, calibration data and signs."""
    task = TASKS[name]
    rig = Rig(task, seed, size, train_float(task, seed, size.share))
    found: Rises = {}
    for line, model, options in _lines(rig, name):
        for scheme in SCHEMES if "outliers" not in line else (AFFINE,):
            rounded = rig.simulated(SCHEMES[scheme], of=model)
            if options is not None:
                gptq_(rounded, rig.calibration, CALIBRATION, **options)
            found[line, scheme] = rig.judge(rounded)[0] - rig.base[0]
    return found


def _lines(rig: Rig, name: str) -> Any:
    """(line of the table, float model, what gptq_ is given)."""
    for way, options in WAYS.items():
        if way.startswith("block") if name == "gpt3" and way not in LARGE else not way.startswith("block"):
            yield way, rig.model, options
    if name != "gpt3":
        return
    yield f"smoothed, {DEFAULT}", _changed(rig, rig.model, smooth=True, rotate=False), {}
    yield f"{BEST}, {DEFAULT}", _changed(rig, rig.model, smooth=False, rotate=True), {}
    outliers = inject_outliers(copy.deepcopy(rig.model), GAIN)
    yield f"outliers, {DEFAULT}", outliers, {}
    yield f"outliers, smoothed, {BEST}, {DEFAULT}", _changed(rig, outliers, smooth=True, rotate=True), {}


def _changed(rig: Rig, of: nn.Module, *, smooth: bool, rotate: bool) -> nn.Module:
    model = copy.deepcopy(of)
    if smooth:
        smooth_(model, rig.calibration, CALIBRATION)
    if rotate:
        rotate_(model, rig.calibration[0][0], SPECS[BEST], seed=rig.seed)
    return model


def tables(found: dict[str, Sequence[Rises]]) -> str:
    """Means of all seeds, and the goals of the transformer with their intervals."""
    parts = []
    for name, seeds in found.items():

        def cell(line: str, scheme: str, seeds: Sequence[Rises] = seeds) -> str:
            known = [rises[line, scheme] for rises in seeds if (line, scheme) in rises]
            return f"{fmean(known):.4f}" if known else ""

        lines = dict.fromkeys(line for line, _ in seeds[0])
        rows = [[line, *(cell(line, scheme) for scheme in SCHEMES)] for line in lines]
        parts.append(f"{name}:\n\n{table(['', *SCHEMES], rows)}")
    goals = [
        judge(f"{scheme}, {line}", "<=", limit, None, [rises[line, scheme] for rises in found["gpt3"]])
        for line, scheme, limit in GOALS
    ]
    return "\n\n".join([*parts, goals_table(goals)])


def main(argv: list[str] | None = None, size: Size | None = None) -> int:
    return run("reconstruction", __doc__, ("bytemlp", "gpt3"), measure, tables, argv, size)


if __name__ == "__main__":
    sys.exit(main())
