"""What equalisation does for weights with one scale a layer, a channel, a group: one table."""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch
from torch import nn

from bench.accuracy.measure import Rig, Size
from bench.accuracy.models import TASKS
from bench.accuracy.records import with_interval
from bench.accuracy.train import train_float
from bench.markers import put
from pyquant import W4A4, W4A8, W8A8, QScheme, equalize_
from pyquant.measure.environment import describe_environment
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
            factor = torch.exp2(OCTAVES * (torch.rand(first.out_features, generator=generator) - 0.5))
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
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy.equalized", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--docs", metavar="FILE", help="put the table between the markers of this Markdown file")
    args = parser.parse_args(argv)
    names = [name for name in NAMES for _ in range(args.seeds)]
    given = (names, [*range(args.seeds)] * len(NAMES), [size or Size()] * len(names))
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            rises = list(pool.map(measure, *given))
    else:
        rises = [measure(*one) for one in zip(*given, strict=True)]
    found = {name: rises[i * args.seeds : (i + 1) * args.seeds] for i, name in enumerate(NAMES)}
    machine = describe_environment("cpu", clock="none: nothing is timed").line()
    print(shown := f"{machine}\n\n{tables(found)}")
    if args.docs:
        put(Path(args.docs), "equalized", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
