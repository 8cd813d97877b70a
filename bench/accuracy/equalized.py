"""What equalisation does for weights with one scale a layer, a channel, a group: one table."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from bench.accuracy.measure import Rig, Size
from bench.accuracy.models import TASKS
from bench.accuracy.records import with_interval
from bench.accuracy.seeds import run
from bench.accuracy.train import train_float
from pyquant import W4A4, W4A8, W8A8, QScheme, equalize_
from pyquant.measure.timing import using_threads
from pyquant.report.render import table

OCTAVES: Final = 6.0  # between the largest and the smallest factor of channels that are spread
NAMES: Final = ("digits", "bytemlp")  # Linears with ReLU between them
WAYS: Final = ("as trained", "equalised", "spread", "spread, equalised")
Rises = dict[tuple[str, str], float]  # {(scheme, way): rise of the cross-entropy}


def _per_tensor(scheme: QScheme) -> QScheme:
    return replace(scheme, weights=replace(scheme.weights, granularity="per_tensor"))


SCHEMES: Final = {
    "W8A8, a scale a layer": _per_tensor(W8A8()),
    "W8A8, a scale a channel": W8A8(),
    "W4A8, a scale a layer": _per_tensor(W4A8(None)),
    "W4A8, a scale a channel": W4A8(None),
    "W4A4 affine, a scale a channel": W4A4(symmetric_inputs=False),
}


def spread(model: nn.Module, seed: int) -> nn.Module:
    """The same function with channels of hidden layers up to 2^OCTAVES apart, as folded BatchNorms leave them."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for first, second in itertools.pairwise(layers):
            factor = torch.exp2(OCTAVES * (torch.rand(first.out_features, generator=generator, device="cpu") - 0.5))
            first.weight *= factor[:, None]
            if first.bias is not None:
                first.bias *= factor
            second.weight /= factor
    return model


@using_threads(1)  # as in measure.py: training that comes out again
def measure(name: str, seed: int, size: Size) -> Rises:
    """Everything of one task and seed: of training, calibration data and factors."""
    task = TASKS[name]
    rig = Rig(task, seed, size, train_float(task, seed, size.share))
    found: Rises = {}
    for way in WAYS:
        model = copy.deepcopy(rig.model)
        if way.startswith("spread"):
            spread(model, seed)
        if way.endswith("equalised"):
            equalize_(model, example_inputs=rig.calibration[0][0])
        for scheme in SCHEMES:
            weights = SCHEMES[scheme].weights.calibrator
            found[scheme, way] = rig.judge(rig.simulated(SCHEMES[scheme], weights, of=model))[0] - rig.base[0]
    return found


def tables(found: dict[str, Sequence[Rises]]) -> str:
    """A line for each task and scheme, a column for each way."""
    lines = [
        [f"{name}, {scheme}", *(with_interval([rises[scheme, way] for rises in seeds]) for way in WAYS)]
        for name, seeds in found.items()
        for scheme in SCHEMES
    ]
    return table(["", *WAYS], lines)


def main(argv: list[str] | None = None, size: Size | None = None) -> int:
    return run("equalized", __doc__, NAMES, measure, tables, argv, size)


if __name__ == "__main__":
    sys.exit(main())
