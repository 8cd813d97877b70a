"""What a call of a small quantised layer is made of on a CPU: torch's module and result, the dispatcher, the kernel.

`python -m bench.call_cost` takes seconds, on one thread and in CPU time; `--docs docs/figures.md` replaces the table
there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.markers import put
from pyquant import W4A16, QLinear, W8A8Dynamic
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import make_clock, time_interleaved, using_threads
from pyquant.report.render import table

SIDE = 384
# What is timed, under the words that the table has for it.
RELU, MODULE, RESULT = "`torch.relu` of the row", "`nn.Module` that returns its input", "`torch.empty` of the result"
EMPTY, OP, LAYER = "`torch.ops.pyquant.qlinear` of no row", "`torch.ops.pyquant.qlinear`", "`QLinear`"
KERNEL = "the kernel (the op less the op of no row)"
WEIGHT_ONLY = "`torch.ops.pyquant._weight_only`"


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.call_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds (default: 40)")
    parser.add_argument("--docs", metavar="FILE", help="also put the table between the markers of this Markdown file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with using_threads(1):
        tables = {"W8A8Dynamic": measure(args.rounds), "W4A16(128) under bfloat16": measure_weight_only(args.rounds)}
        text = describe_environment("cpu", clock="cpu").line()
    for scheme, us in tables.items():
        rows = [[name, f"{time:.2f}", f"{time / us[RELU]:.1f}"] for name, time in us.items()]
        text += "\n\n" + table([f"one row, {SIDE}x{SIDE}, {scheme}", "us", "calls of relu"], rows)
    print(text)
    if args.docs:
        put(Path(args.docs), "bench.call_cost", text)
    return 0


def measure(rounds: int) -> dict[str, float]:
    """Microseconds a call of each part of a layer of integers, and of the whole."""
    torch.manual_seed(0)
    layer = QLinear.from_float(nn.Linear(SIDE, SIDE), W8A8Dynamic())
    x, none, nothing = torch.randn(1, SIDE, device="cpu"), torch.zeros(0, SIDE, device="cpu"), _Nothing()
    op, operands = torch.ops.pyquant.qlinear.default, (layer.storage, None, layer._spec)
    candidates = {
        RELU: lambda: torch.relu(x),
        MODULE: lambda: nothing(x),
        RESULT: lambda: torch.empty(1, SIDE, device="cpu"),
        EMPTY: lambda: op(none, *operands),
        OP: lambda: op(x, *operands),
        LAYER: lambda: layer(x),
    }
    us = _timed(candidates, rounds)
    return us | {KERNEL: us[OP] - us[EMPTY]}


def measure_weight_only(rounds: int) -> dict[str, float]:
    """The same of a layer of integer weights under floats, and of its op."""
    torch.manual_seed(0)
    layer = QLinear.from_float(nn.Linear(SIDE, SIDE).bfloat16(), W4A16(128))
    x = torch.randn(1, SIDE, dtype=torch.bfloat16, device="cpu")
    numbers = (layer.storage, layer.weight_scale_, layer.weight_zero_point_, layer.bias_)
    op, none = torch.ops.pyquant._weight_only.default, x[:0]
    candidates = {
        RELU: lambda: torch.relu(x),
        f"{WEIGHT_ONLY} of no row": lambda: op(none, *numbers, None, 4, 128),
        WEIGHT_ONLY: lambda: op(x, *numbers, None, 4, 128),
        LAYER: lambda: layer(x),
    }
    return _timed(candidates, rounds)


def _timed(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times = time_interleaved(candidates, clock=make_clock("cpu"), rounds=rounds)
    return {name: times.median_us(name) for name in candidates}


if __name__ == "__main__":
    sys.exit(main())
