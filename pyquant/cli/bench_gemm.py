"""`pyquant bench gemm`: a quantised Linear next to its rivals, with ratios and the physical floor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from pyquant.bench.gemm import GemmBench, run_gemm_bench
from pyquant.bench.model_shapes import parse_kn
from pyquant.bench.peers import FP32, PEERS, at, named
from pyquant.cli import bench_gpu
from pyquant.cli.progress import ProgressBar
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS_BY_NAME
from pyquant.errors import ArgumentError
from pyquant.measure.floors import measure_ceilings
from pyquant.measure.timing import default_clock, using_threads
from pyquant.report.gemm import gemm_markdown
from pyquant.report.registry import write_files

HELP = "one linear layer, all candidates side by side"
_EXAMPLES = """\
examples:
  pyquant bench gemm
  pyquant bench gemm --m 1 8 64 512 --kn 384x1536 4096x4096 --schemes W8A8Dynamic "W4A8Dynamic(group_size=64)"
  pyquant bench gemm --peers fbgemm bf16 --json gemm.json --csv gemm.csv --plot gemm.png
  pyquant bench gemm --device cuda --models llama-3-8b --m 1 16 256 4096 --out results
  pyquant bench gemm --device cuda --candidates W8A8 scaled_mm --kn 8192x8192 --m 16

the machine's threads and wall time are the default; on a machine that others use, --threads 1 times one thread by CPU
time, which repeats. Every candidate's product is checked before it is timed. On a GPU graphs are replayed with weights
that rotate beyond the caches, and a run that is killed goes on with what its --out folder holds.
"""
_KN = ("384x1536", "1024x4096")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times a quantised Linear and its rivals in interleaved rounds of one run and prints microseconds, "
        "the ratio to the baseline, and the share of the physical floor that was reached."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--m", type=int, nargs="+", metavar="M", help="rows (default: 1 64; on a GPU 1 to 8192)")
    add(
        "--kn",
        nargs="+",
        metavar="KxN",
        help="in_features x out_features (default: 384x1536 1024x4096; on a GPU --models)",
    )
    add(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        help="preset, with options in brackets (default: W8A8Dynamic W4A8Dynamic)",
    )
    add("--peers", nargs="*", metavar="NAME", help="rivals, by part of their name (default: all)")
    add("--baseline", metavar="NAME", help=f"what ratios divide by (default: {FP32})")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: cpu)")
    add("--dtype", choices=FLOATS_BY_NAME, help="of input and output (default: float32; on a GPU bfloat16)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the machine's)")
    add(
        "--clock",
        choices=("cpu", "wall", "cuda-events", "cuda-graph", "faked"),
        help="default: wall, cpu with one thread; cuda-graph on a GPU; faked: a dry run, without a GPU too",
    )
    add("--rounds", type=int, default=15, metavar="N", help="interleaved rounds (default: 15)")
    add("--cold", action="store_true", help="flush the caches before every call")
    add("--no-floor", action="store_true", help="do not measure the machine's limits")
    add("--json", metavar="FILE", help="write the records as JSON")
    add("--csv", metavar="FILE", help="write the rows as CSV")
    add("--plot", metavar="FILE.png", help="draw a picture (needs matplotlib)")
    bench_gpu.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints Markdown. -> 0, or 1 when a pyquant layer's bits differ from the specification."""
    if args.device.startswith("cuda") or args.merge:
        return _on_gpu(args)
    bench = bench_from_args(args)
    with using_threads(args.threads):
        ceilings = [] if args.no_floor else measure_ceilings("cpu")
        with ProgressBar("bench gemm", len(bench.shapes)) as shown:
            report = run_gemm_bench(bench, ceilings=ceilings, on_shape=lambda shape: shown.step(at(shape)))
    print(gemm_markdown(report), end="")
    write_files(report, json=args.json, csv=args.csv, png=args.plot)
    return 1 if any(row.exact is False for row in report.rows) else 0


def bench_from_args(args: argparse.Namespace) -> GemmBench:
    """The CPU benchmark that the arguments describe. Raises ArgumentError naming the option that is wrong."""
    if args.device != "cpu":
        raise ArgumentError("--device", args.device, "cpu, cuda, cuda:1 ...")
    if wrong := bench_gpu.given(args):
        raise ArgumentError(wrong[0], "given", "with --device cuda only")
    if args.threads is not None:
        arguments.whole("--threads", args.threads, 1)
    return GemmBench(
        shapes=[(arguments.whole("--m", m, 1), *parse_kn(kn)) for m in args.m or (1, 64) for kn in args.kn or _KN],
        schemes=args.schemes or ("W8A8Dynamic", "W4A8Dynamic"),
        peers=None if args.peers is None else match_peers(args.peers),
        baseline=match_peers([args.baseline or FP32])[0],
        dtype=FLOATS_BY_NAME[args.dtype or "float32"],
        clock=args.clock or default_clock(args.threads or torch.get_num_threads()),
        rounds=arguments.whole("--rounds", args.rounds, 1),
        cold=args.cold,
    )


def _on_gpu(args: argparse.Namespace) -> int:
    """The GPU benchmark, after refusing what it has no use for."""
    for option, value, instead in (
        ("--schemes", args.schemes, "--candidates"),
        ("--peers", args.peers, "--candidates"),
        ("--baseline", args.baseline, "torch.mm bf16, always"),
        ("--threads", args.threads, "no CPU threads there"),
        ("--cold", args.cold or None, "weights that rotate beyond the caches, always"),
    ):
        if value is not None:
            raise ArgumentError(option, value, f"--device cpu only; on a GPU: {instead}")
    if args.dtype not in (None, "bfloat16"):
        raise ArgumentError("--dtype", args.dtype, "bfloat16 with --device cuda")
    for option, value in [("--rounds", args.rounds), *(("--m", m) for m in args.m or ())]:
        arguments.whole(option, value, 1)
    return bench_gpu.run(args, None if args.kn is None else [parse_kn(kn) for kn in args.kn])


def match_peers(texts: Sequence[str]) -> list[str]:
    """The peers whose names hold one of the texts."""
    return named(texts, [peer.name for peer in PEERS], "--peers")
