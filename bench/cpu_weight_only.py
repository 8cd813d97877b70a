"""Weight-only layers on a CPU beside F.linear in fp32 and bf16 and torch's own int4 product.

`python -m bench.cpu_weight_only` runs with the machine's threads (`--threads 1`: one thread, CPU time), takes five
minutes and writes bench/results/cpu-<model>/; exit code 1 when a bar is missed. The layers take and give bf16, as
checkpoints of language models do (`--dtype float32`: what a model in float32 has).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.cpu_linear import KN, MS, us_of
from bench.shared import folder_name, geometric_mean
from pyquant.bench.gemm import GemmBench, run_gemm_bench
from pyquant.bench.model_shapes import parse_kn
from pyquant.bench.peers import BF16, FP32, TORCH_INT4
from pyquant.cli.progress import ProgressBar
from pyquant.measure.floors import measure_ceilings
from pyquant.measure.timing import default_clock, using_threads
from pyquant.report import registry
from pyquant.report.gemm import gemm_markdown
from pyquant.report.records.bench import Bar, GemmRow
from pyquant.report.render import write_text

W4, W8 = "W4A16(group_size=128)", "W8A16"
# Times of fp32 at few rows, where weights bind; of the faster of fp32 and bf16 at many, where products do.
GOALS = {W4: {1: 5.0, 8: 3.0, 64: 0.97, 512: 0.97}, W8: {1: 3.0, 8: 2.0, 64: 0.97, 512: 0.97}}
MANY = 64
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_weight_only", description=__doc__.split("\n")[0])
    parser.add_argument("--m", type=int, nargs="+", default=list(MS), help="default: 1 8 64 512")
    parser.add_argument("--kn", nargs="+", default=list(KN), metavar="KxN", help="default: seven shapes")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds a shape (default: 15)")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds a shape after which rounds end (default: 8)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of the layers (default: bfloat16)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    parser.add_argument("--out", default=None, metavar="DIR", help="default: bench/results/cpu-<model>")
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads {args.threads}: at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with using_threads(args.threads):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    shapes = [(m, *parse_kn(kn)) for m in args.m for kn in args.kn]
    threads = torch.get_num_threads()
    bench = GemmBench(
        shapes,
        schemes=[W4, W8],
        dtype=DTYPES[args.dtype],
        peers=[BF16, TORCH_INT4],
        clock=default_clock(threads),
        rounds=args.rounds,
        budget_s=args.budget,
    )
    with ProgressBar("cpu_weight_only", len(shapes) + 1) as shown:
        shown.step("limits of the machine")
        ceilings = measure_ceilings("cpu")
        report = run_gemm_bench(bench, ceilings=ceilings, on_shape=lambda s: shown.step("M={} K={} N={}".format(*s)))
    report = replace(report, bars=bars_of(report.rows))
    markdown = gemm_markdown(report, f"Weight-only layers on a CPU, {args.dtype}, threads: {threads}")
    print(markdown)
    name = "cpu_weight_only" + ("_float32" if args.dtype == "float32" else "")
    name += "_one_thread" if threads == 1 else ""
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    for path in (write_text(out / f"{name}.md", markdown), *registry.write(report, out, name, ("json", "csv"))):
        print(f"wrote {path}")
    return 0 if all(bar.passed for bar in report.bars) else 1


def bars_of(rows: Sequence[GemmRow]) -> list[Bar]:
    """Against fp32, or from MANY rows on the faster of fp32 and bf16, geometric means over the shapes of each M."""
    fp32, bf16 = us_of(rows, FP32), us_of(rows, BF16)
    bars = []
    for scheme, goals in GOALS.items():
        ours = us_of(rows, f"QLinear {scheme}")
        for m, goal in goals.items():
            ratios = [
                (min(fp32[shape], bf16.get(shape, fp32[shape])) if m >= MANY else fp32[shape]) / us
                for shape, us in ours.items()
                if shape[0] == m
            ]
            if ratios:
                rival = f"the faster of {FP32} and {BF16}" if m >= MANY else FP32
                bars.append(
                    Bar(f"{scheme}, M={m}, against {rival}, {len(ratios)} shapes", goal, geometric_mean(ratios))
                )
    return bars


if __name__ == "__main__":
    sys.exit(main())
