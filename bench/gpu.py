"""What `make gpu` measures on a machine with a GPU: the chip's ceilings, then every scheme next to torch's own kernels.

CUDA-graph replay, weights rotated beyond the L2 cache, random data, candidates interleaved, and every pyquant result
checked bit for bit against the specification in the same run. Writes bench/results/<gpu>/.
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
from pyquant.measure.gemm import GemmBench, Shape, run_gemm_bench
from pyquant.measure.peers import MM_BF16
from pyquant.measure.records import GemmReport, GemmRow
from pyquant.measure.timing import geometric_mean
from pyquant.report.render import gemm_markdown, to_csv, to_json, write_text

LLAMA_KN = ("4096x4096", "4096x14336", "14336x4096", "8192x8192", "8192x28672", "28672x8192")
BERT_KN = ("768x768", "768x3072", "3072x768")
MS = (1, 16, 64, 256, 1024, 2048, 8192)
SCHEMES = ("W8A8", "W8A8Dynamic", "W4A8Dynamic(group_size=None)", "W4A8Dynamic(group_size=128)", "W8A16", "W4A16")
_ROTATE_BYTES = 200 << 20  # more than the L2 of any GPU that the kernels know
_MAX_COPIES = 64


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--m", type=int, nargs="+", default=list(MS))
    parser.add_argument("--kn", nargs="+", default=[*LLAMA_KN, *BERT_KN], metavar="KxN")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds a shape (default: 9)")
    parser.add_argument(
        "--budget", type=float, default=10.0, help="seconds a shape after which rounds end (default: 10)"
    )
    parser.add_argument("--out", default=None, metavar="DIR", help="default: bench/results/<gpu>")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("bench.gpu needs a GPU that torch can use; there is none", file=sys.stderr)
        return 2
    torch.cuda.set_device(args.device)
    shapes = [(m, *parse_kn(kn)) for kn in args.kn for m in args.m]
    bench = GemmBench(
        shapes, schemes=args.schemes, baseline=MM_BF16, device=args.device, dtype=torch.bfloat16, clock="cuda-graph",
        rounds=args.rounds, budget_s=args.budget, weights=copies_beyond_l2,
    )  # fmt: skip
    with Progress("gpu", len(shapes) + 1) as shown:
        shown.step("ceilings: copy, bf16, fp16, int8, fp8 at 8192^3")
        ceilings = measure_ceilings(args.device)
        report = run_gemm_bench(
            bench, ceilings=ceilings, on_shape=lambda shape: shown.step("M={} K={} N={}".format(*shape))
        )
    report = GemmReport(
        report.environment, report.baseline, report.rows, report.ceilings, report.unavailable, report.bars,
        [*report.notes, *geometric_means(report.rows)],
    )  # fmt: skip
    markdown = gemm_markdown(report, f"Linear layers on {report.environment.gpu}")
    print(markdown)
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    for name, text in (("gpu.md", markdown), ("gpu.json", to_json(report)), ("gpu.csv", to_csv(report))):
        print(f"wrote {write_text(out / name, text)}")
    return verdict(report)


def copies_beyond_l2(shape: Shape) -> int:
    """Copies of the weights so that even packed to 4 bits they exceed every L2; at most 64."""
    _, k, n = shape
    return max(1, min(_MAX_COPIES, math.ceil(_ROTATE_BYTES / max(1, k * n // 2))))


def geometric_means(rows: Sequence[GemmRow]) -> list[str]:
    """One line for each pyquant candidate and M: the geometric mean of its ratios over the shapes."""
    lines = []
    for name in dict.fromkeys(row.candidate for row in rows if row.ours):
        for m in sorted({row.m for row in rows}):
            ratios = [row.ratio for row in rows if row.candidate == name and row.m == m]
            if ratios:
                lines.append(f"{name}, M={m}: {geometric_mean(ratios):.2f}x over {len(ratios)} shapes")
    return lines


def verdict(report: GemmReport) -> int:
    """Exit code: 1 when no pyquant row was measured (a run that did nothing is a failure) or a bit was wrong."""
    ours = [row for row in report.rows if row.ours]
    if not ours:
        print("no pyquant kernel ran", file=sys.stderr)
        return 1
    return 1 if any(row.exact is False for row in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
