"""What the transform of a HadamardLinear adds to a W4A4 layer on a CPU.

`python -m bench.hadamard --threads 1` takes some seconds; `--docs docs/rotation.md` replaces the table there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from bench.markers import put
from pyquant import HadamardLinear, W4A4Dynamic, quantize_
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import default_clock, make_clock, time_interleaved, using_threads
from pyquant.report.render import table

ROWS, WIDTHS = (1, 8, 64, 512), (1024, 4096)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hadamard", description=__doc__.split("\n")[0])
    parser.add_argument("--m", type=int, nargs="+", default=list(ROWS), help="default: 1 8 64 512")
    parser.add_argument("--k", type=int, nargs="+", default=list(WIDTHS), help="K = N; default: 1024 4096")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: 15)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    parser.add_argument("--docs", metavar="FILE", help="also put the table between the markers of this Markdown file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with using_threads(args.threads):
        clock = default_clock(torch.get_num_threads())
        rows = [_row(m, k, args.rounds, clock) for k in args.k for m in args.m]
        environment = describe_environment("cpu", clock=clock)
    text = f"{environment.line()}\n\n{table(['K = N', 'rows', 'W4A4, ms', 'with the transform, ms', 'times'], rows)}"
    print(text)
    if args.docs:
        put(Path(args.docs), "bench.hadamard", text)
    return 0


def _row(m: int, k: int, rounds: int, clock: str) -> list[str]:
    torch.manual_seed(0)
    layer = HadamardLinear.from_linear(nn.Linear(k, k), k)
    quantize_(layer, W4A4Dynamic(group_size=None), check_speed=False)
    x = torch.randn(m, k, device="cpu")
    candidates = {"plain": lambda: layer.linear(x), "transformed": lambda: layer(x)}
    times = time_interleaved(candidates, clock=make_clock(clock), rounds=rounds)
    plain, transformed = (times.median_us(name) / 1e3 for name in candidates)
    ratio = times.ratio("transformed", "plain")
    return [str(k), str(m), f"{plain:.3f}", f"{transformed:.3f}", f"{ratio:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
