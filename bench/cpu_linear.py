"""The CPU bars as one command: QLinear against F.linear fp32 and torch.ao's fbgemm path, one thread, hot, CPU time.

`python -m bench.cpu_linear` runs all of it in about five minutes and writes bench/results/cpu-<model>/; exit code 1
when a bar is missed or a bit is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pyquant.cli.bench import parse_kn
from pyquant.cli.progress import Progress
from pyquant.measure.environment import folder_name
from pyquant.measure.floors import measure_ceilings
from pyquant.measure.gemm import GemmBench, run_gemm_bench
from pyquant.measure.peers import FBGEMM, FP32, INT_MM_CODES
from pyquant.measure.records import Bar, GemmReport, GemmRow
from pyquant.measure.timing import geometric_mean
from pyquant.report.render import gemm_markdown, to_csv, to_json, write_text

KN = ("384x384", "384x1536", "1536x384", "768x3072", "1024x4096", "4096x4096", "4096x11008")
MS = (1, 8, 64, 512)
W8, W4 = "W8A8Dynamic", "W4A8Dynamic(group_size=128)"
GOALS = {W8: {1: 6.0, 8: 8.0, 64: 5.5, 512: 4.2}, W4: {1: 9.0, 8: 5.5, 64: 4.5, 512: 3.5}}
OVERHEAD_US = 6.0
OVERHEAD_SHAPE = (1, 384, 384)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_linear", description=__doc__.split("\n")[0])
    parser.add_argument("--m", type=int, nargs="+", default=list(MS), help="default: 1 8 64 512")
    parser.add_argument(
        "--kn", nargs="+", default=list(KN), metavar="KxN", help="default: the seven shapes of the bars"
    )
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds a shape (default: 15)")
    parser.add_argument(
        "--budget", type=float, default=12.0, help="seconds a shape after which rounds end (default: 12)"
    )
    parser.add_argument("--out", default=None, metavar="DIR", help="default: bench/results/cpu-<model>")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    shapes = [(m, *parse_kn(kn)) for m in args.m for kn in args.kn]
    bench = GemmBench(shapes, schemes=[W8, W4], peers=[FBGEMM], rounds=args.rounds, budget_s=args.budget)
    with Progress("cpu_linear", len(shapes) + 2) as shown:
        shown.step("limits of the machine")
        ceilings = measure_ceilings("cpu")
        shown.step("call overhead")
        overhead = run_gemm_bench(
            GemmBench([OVERHEAD_SHAPE], schemes=[W8], peers=[INT_MM_CODES], rounds=4 * args.rounds, check_exact=False)
        )
        report = run_gemm_bench(
            bench, ceilings=ceilings, on_shape=lambda shape: shown.step("M={} K={} N={}".format(*shape))
        )
    report = GemmReport(
        report.environment, report.baseline, report.rows, report.ceilings, report.unavailable,
        bars=[*bars_of(report.rows), overhead_bar(overhead.rows)],
        notes=[*report.notes, "never behind fbgemm: the smallest ratio over all shapes of that M",
               "call overhead: QLinear at 384x384, M=1, less torch._int_mm on ready codes of the same shape"],
    )  # fmt: skip
    markdown = gemm_markdown(report, "CPU linear layers against the bars")
    print(markdown)
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    for name, text in (
        ("cpu_linear.md", markdown), ("cpu_linear.json", to_json(report)), ("cpu_linear.csv", to_csv(report)),
    ):  # fmt: skip
        print(f"wrote {write_text(out / name, text)}")
    inexact = [row for row in report.rows if row.exact is False]
    return 1 if inexact or not all(bar.passed for bar in report.bars) else 0


def bars_of(rows: Sequence[GemmRow]) -> list[Bar]:
    """The bars that the rows can answer: geometric means against fp32, and the worst shape against fbgemm."""
    bars = []
    for scheme, goals in GOALS.items():
        name = f"QLinear {scheme}"
        for m, goal in goals.items():
            ratios = [row.ratio for row in rows if row.candidate == name and row.m == m]
            if ratios:
                bars.append(Bar(f"{scheme}, M={m}, against {FP32}, {len(ratios)} shapes", goal, geometric_mean(ratios)))
    fbgemm = {(row.m, row.k, row.n): row.median_us for row in rows if row.candidate == FBGEMM}
    for m in sorted({row.m for row in rows}):
        against = [
            fbgemm[row.m, row.k, row.n] / row.median_us
            for row in rows
            if row.m == m and row.candidate == f"QLinear {W8}" and (row.m, row.k, row.n) in fbgemm
        ]
        if against:
            bars.append(Bar(f"{W8}, M={m}, never behind {FBGEMM}", 1.0, min(against)))
    return bars


def overhead_bar(rows: Sequence[GemmRow]) -> Bar:
    """What a QLinear call costs beyond torch's own integer op on codes that are ready."""
    us = {row.candidate: row.median_us for row in rows}
    ours = us.get(f"QLinear {W8}", math.inf)  # it did not run: the bar is missed
    return Bar("call overhead, 384x384, M=1", OVERHEAD_US, ours - us[INT_MM_CODES], "<=", "us")


if __name__ == "__main__":
    sys.exit(main())
