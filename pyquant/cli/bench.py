"""`pyquant bench gemm`: a quantised Linear next to its rivals, with ratios and the physical floor."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from pyquant.cli.progress import Progress
from pyquant.errors import ArgumentError
from pyquant.measure.floors import measure_ceilings
from pyquant.measure.gemm import GemmBench, run_gemm_bench
from pyquant.measure.peers import FP32, peers_for
from pyquant.measure.records import GemmReport
from pyquant.report.render import gemm_markdown, to_csv, to_json, write_text

_EXAMPLES = """\
examples:
  pyquant bench gemm
  pyquant bench gemm --m 1 8 64 512 --kn 384x1536 4096x4096 --schemes W8A8Dynamic "W4A8Dynamic(group_size=64)"
  pyquant bench gemm --peers fbgemm bf16 --json gemm.json --csv gemm.csv --plot gemm.png
  pyquant bench gemm --device cuda --dtype bfloat16 --clock cuda-graph

one thread and CPU time are the default: on a shared machine nothing else repeats; use --threads N --clock wall on a
quiet one. Every candidate's product is checked before it is timed.
"""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def add_parser(commands: Any) -> None:
    """Adds `bench` with its sub-command `gemm`."""
    bench = commands.add_parser("bench", help="measure: `pyquant bench gemm`", description="Measurements.")
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    gemm = kinds.add_parser(
        "gemm",
        help="one linear layer, all candidates side by side",
        description="Times a quantised Linear and its rivals in interleaved rounds of one run and prints microseconds, "
        "the ratio to the baseline, and the share of the physical floor that was reached.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gemm.add_argument("--m", type=int, nargs="+", default=[1, 64], metavar="M", help="rows (default: 1 64)")
    gemm.add_argument("--kn", nargs="+", default=["384x1536", "1024x4096"], metavar="KxN",
                      help="in_features x out_features (default: 384x1536 1024x4096)")  # fmt: skip
    gemm.add_argument("--schemes", nargs="+", default=["W8A8Dynamic", "W4A8Dynamic"], metavar="SCHEME",
                      help="preset, with options in brackets (default: W8A8Dynamic W4A8Dynamic)")  # fmt: skip
    gemm.add_argument("--peers", nargs="*", metavar="NAME", help="rivals, by part of their name (default: all)")
    gemm.add_argument("--baseline", default=FP32, metavar="NAME", help=f"what ratios divide by (default: {FP32})")
    gemm.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: cpu)")
    gemm.add_argument("--dtype", choices=_DTYPES, help="input and output (default: float32 on a CPU, else bfloat16)")
    gemm.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    gemm.add_argument("--clock", choices=("cpu", "wall", "cuda-events", "cuda-graph"),
                      help="default: cpu; cuda-graph on a GPU")  # fmt: skip
    gemm.add_argument("--rounds", type=int, default=15, metavar="N", help="interleaved rounds (default: 15)")
    gemm.add_argument("--cold", action="store_true", help="flush the caches before every call")
    gemm.add_argument("--no-floor", action="store_true", help="do not measure the machine's limits")
    gemm.add_argument("--json", metavar="FILE", help="write the records as JSON")
    gemm.add_argument("--csv", metavar="FILE", help="write the rows as CSV")
    gemm.add_argument("--plot", metavar="FILE.png", help="draw a picture (needs matplotlib)")
    gemm.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints Markdown. -> 0, or 1 when a pyquant layer's bits differ from the specification."""
    bench = bench_from_args(args)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        ceilings = [] if args.no_floor else measure_ceilings(bench.device)
        with Progress("bench gemm", len(bench.shapes)) as shown:
            report = run_gemm_bench(
                bench, ceilings=ceilings, on_shape=lambda shape: shown.step("M={} K={} N={}".format(*shape))
            )
    finally:
        torch.set_num_threads(threads_before)
    print(gemm_markdown(report), end="")
    _write(args, report)
    return 1 if any(row.exact is False for row in report.rows) else 0


def bench_from_args(args: argparse.Namespace) -> GemmBench:
    """The benchmark that the arguments describe. Raises ArgumentError naming the option that is wrong."""
    if args.threads < 1:
        raise ArgumentError("--threads", args.threads, ">= 1")
    on_gpu = args.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        raise ArgumentError("--device", args.device, "a device that torch can use here: cpu")
    return GemmBench(
        shapes=[(m, *parse_kn(kn)) for m in _positive("--m", args.m) for kn in args.kn],
        schemes=args.schemes,
        peers=None if args.peers is None else match_peers(args.peers, args.device),
        baseline=match_peers([args.baseline], args.device)[0],
        device=args.device,
        dtype=_DTYPES[args.dtype or ("bfloat16" if on_gpu else "float32")],
        clock=args.clock or ("cuda-graph" if on_gpu else "cpu"),
        rounds=_positive("--rounds", [args.rounds])[0],
        cold=args.cold,
    )


def parse_kn(text: str) -> tuple[int, int]:
    """'1024x4096' -> (1024, 4096); ArgumentError otherwise."""
    k, _, n = text.lower().partition("x")
    if not (k.isdecimal() and n.isdecimal() and int(k) > 0 and int(n) > 0):
        raise ArgumentError("--kn", repr(text), "in_features x out_features, such as 1024x4096")
    return int(k), int(n)


def match_peers(texts: Sequence[str], device: str) -> list[str]:
    """The peers of `device` whose names hold one of the texts, upper and lower case alike; exact names win."""
    names = [peer.name for peer in peers_for(device)]
    found: list[str] = []
    for text in texts:
        hits = [n for n in names if n == text] or [n for n in names if text.lower() in n.lower()]
        if not hits:
            raise ArgumentError("--peers", repr(text), "part of one of: " + ", ".join(names))
        found += [hit for hit in hits if hit not in found]
    return found


def _positive(option: str, values: Sequence[int]) -> Sequence[int]:
    for value in values:
        if value < 1:
            raise ArgumentError(option, value, ">= 1")
    return values


def _write(args: argparse.Namespace, report: GemmReport) -> None:
    if args.json:
        write_text(args.json, to_json(report))
    if args.csv:
        write_text(args.csv, to_csv(report))
    if args.plot:
        from pyquant.report.plot import plot_gemm

        plot_gemm(report, args.plot)
