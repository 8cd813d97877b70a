"""The CPU bars as one command: QLinear against F.linear fp32, torch.ao's fbgemm path and the machine's own limits.

`python -m bench.cpu_linear` runs with the machine's threads (`--threads 1`: one thread, CPU time), takes about six
minutes and writes bench/results/cpu-<model>/; exit code 1 when a bar is missed or a bit is wrong. `--scaling` times our
layers at 1, 2, 4 ... threads against the same code on one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench import scaling
from bench.shared import folder_name, geometric_mean
from pyquant.bench.gemm import GemmBench, run_gemm_bench
from pyquant.bench.model_shapes import parse_kn
from pyquant.bench.peers import FBGEMM, FP32
from pyquant.bench.problem import inputs_of
from pyquant.cli.progress import ProgressBar
from pyquant.core.presets import scheme_from_name
from pyquant.measure.floors import measure_ceilings
from pyquant.measure.timing import default_clock, make_clock, time_interleaved, using_threads
from pyquant.report import registry
from pyquant.report.gemm import gemm_markdown
from pyquant.report.records.bench import Bar, GemmRow
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

KN = ("384x384", "384x1536", "1536x384", "768x3072", "1024x4096", "4096x4096", "4096x11008")
MS = (1, 8, 64, 512)
W8, W4 = "W8A8Dynamic", "W4A8Dynamic(group_size=128)"
GOALS = {W8: {1: 6.0, 8: 8.0, 64: 5.5, 512: 4.2}, W4: {1: 9.0, 8: 5.5, 64: 4.5, 512: 3.5}}
# Shares of the machine's own limits, for layers of at least LEAST_SIDE inputs and outputs: others are mostly call.
LEAST_SIDE = 768
SHARES = {8: 0.75, 64: 0.90, 512: 0.90}
SHARE_AT_ONE_ROW, BEYOND_CACHE = 0.85, 4 << 20  # of the bandwidth; bytes of weights that are read from afar
W4_SLOWER = 1.10
POOR_RULER = 1.05
CALL_SHAPE, CALL_GOAL = (1, 384, 384), 3.0  # in calls of torch.relu, the cheapest op of torch, on the same row


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
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    parser.add_argument("--scaling", action="store_true", help="only the table of thread counts against one thread")
    parser.add_argument("--out", default=None, metavar="DIR", help="default: bench/results/cpu-<model>")
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads {args.threads}: at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with using_threads(args.threads):
        return _scaling(args) if args.scaling else _linear(args)


def _linear(args: argparse.Namespace) -> int:
    shapes = [(m, *parse_kn(kn)) for m in args.m for kn in args.kn]
    threads = torch.get_num_threads()
    bench = GemmBench(
        shapes, schemes=[W8, W4], peers=[FBGEMM], clock=default_clock(threads), rounds=args.rounds, budget_s=args.budget
    )
    with ProgressBar("cpu_linear", len(shapes) + 2) as shown:
        shown.step("limits of the machine")
        ceilings = measure_ceilings("cpu")
        shown.step("one call")
        call = call_bar(4 * args.rounds)
        report = run_gemm_bench(
            bench, ceilings=ceilings, on_shape=lambda shape: shown.step("M={} K={} N={}".format(*shape))
        )
    report = replace(report, bars=[*bars_of(report.rows), call], notes=[*report.notes, *_NOTES])
    markdown = gemm_markdown(report, f"CPU linear layers against the bars, threads: {threads}")
    print(markdown)
    name = "cpu_linear_one_thread" if threads == 1 else "cpu_linear"
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    for path in (write_text(out / f"{name}.md", markdown), *registry.write(report, out, name, ("json", "csv"))):
        print(f"wrote {path}")
    inexact = [row for row in report.rows if row.exact is False]
    return 1 if inexact or not all(bar.passed for bar in report.bars) else 0


def _scaling(args: argparse.Namespace) -> int:
    shapes = [(m, *parse_kn(kn)) for m in args.m for kn in args.kn]
    with ProgressBar("scaling", 2 * len(shapes)) as shown:
        report = scaling.measure(shapes, (W8, W4), args.rounds, args.budget, shown.step)
    markdown = scaling.markdown(report)
    print(markdown)
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    paths = write_text(out / "cpu_scaling.md", markdown), save_record(out / "cpu_scaling.json", figures_of(report))
    print("wrote {}, {}".format(*paths))
    return 0 if all(bar.passed for bar in report.bars) else 1


_NOTES = (
    "never behind fbgemm: the smallest ratio over all shapes of that M",
    (
        f"of the limit: the smallest share of the floor over shapes with K and N >= {LEAST_SIDE}; at M = 1, over those "
        f"with at least {BEYOND_CACHE >> 20} MiB of weights"
    ),
    "one call: QLinear at 384x384, M=1, over torch.relu on the same row, median of the ratios of a round",
    "largest share of a limit: above 1 the limit was measured badly, and the shares of this run mean nothing",
)


def bars_of(rows: Sequence[GemmRow]) -> list[Bar]:
    """The bars that the rows can answer: against fp32 and fbgemm, and as shares of the machine's limits."""
    return [*_against_fp32(rows), *_against_fbgemm(rows), *_of_the_limit(rows), *_four_bits(rows)]


def _against_fp32(rows: Sequence[GemmRow]) -> list[Bar]:
    bars = []
    for scheme, goals in GOALS.items():
        for m, goal in goals.items():
            ratios = [row.ratio for row in rows if row.candidate == f"QLinear {scheme}" and row.m == m]
            if ratios:
                bars.append(Bar(f"{scheme}, M={m}, against {FP32}, {len(ratios)} shapes", goal, geometric_mean(ratios)))
    return bars


def _against_fbgemm(rows: Sequence[GemmRow]) -> list[Bar]:
    fbgemm, bars = us_of(rows, FBGEMM), []
    ours = us_of(rows, f"QLinear {W8}")
    for m in sorted({row.m for row in rows}):
        against = [fbgemm[shape] / us for shape, us in ours.items() if shape[0] == m and shape in fbgemm]
        if against:
            bars.append(Bar(f"{W8}, M={m}, never behind {FBGEMM}", 1.0, min(against)))
    return bars


def _of_the_limit(rows: Sequence[GemmRow]) -> list[Bar]:
    shares = {
        (row.m, row.k, row.n): row.of_floor
        for row in rows
        if row.candidate == f"QLinear {W8}" and row.of_floor is not None
    }
    bars = []
    far = [share for (m, k, n), share in shares.items() if m == 1 and k * n >= BEYOND_CACHE]
    if far:
        bars.append(Bar(f"{W8}, M=1, of the limit", SHARE_AT_ONE_ROW, min(far), unit=""))
    for goal_m, goal in SHARES.items():
        there = [share for (m, k, n), share in shares.items() if m == goal_m and min(k, n) >= LEAST_SIDE]
        if there:
            bars.append(Bar(f"{W8}, M={goal_m}, of the limit", goal, min(there), unit=""))
    if shares:
        bars.append(Bar("largest share of a limit", POOR_RULER, max(shares.values()), "<=", ""))
    return bars


def _four_bits(rows: Sequence[GemmRow]) -> list[Bar]:
    eight, four = us_of(rows, f"QLinear {W8}"), us_of(rows, f"QLinear {W4}")
    slower = [us / eight[s] for s, us in four.items() if s in eight and s[0] >= 64 and min(s[1:]) >= LEAST_SIDE]
    return [Bar(f"{W4}, M >= 64, time over {W8}'s", W4_SLOWER, max(slower), "<=")] if slower else []


def us_of(rows: Sequence[GemmRow], candidate: str) -> dict[tuple[int, int, int], float]:
    """Microseconds a call of one candidate at each shape (m, k, n)."""
    return {(row.m, row.k, row.n): row.median_us for row in rows if row.candidate == candidate}


def call_bar(rounds: int) -> Bar:
    """What a call of a small layer costs on one thread, in calls of the cheapest op of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layer, x = inputs_of(*CALL_SHAPE).qlinear(scheme_from_name(W8), torch.float32)
        runs = {"relu": lambda: torch.relu(x), "layer": lambda: layer(x)}
        timings = time_interleaved(runs, clock=make_clock("cpu"), rounds=rounds)
    finally:
        torch.set_num_threads(threads)
    return Bar("one call, 384x384, M=1, in calls of torch.relu", CALL_GOAL, timings.ratio("layer", "relu"), "<=")


if __name__ == "__main__":
    sys.exit(main())
