"""`pyquant bench decode`: layers of a language model at their real sizes, prompt and decode apart."""

from __future__ import annotations

import argparse

import torch

from pyquant.bench.decode import SCHEMES, DecodeBench, candidates_of, run_decode_bench
from pyquant.bench.decode_net import CONFIGS
from pyquant.cli.bench_gpu import select_device
from pyquant.cli.progress import ProgressBar
from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.measure.timing import default_clock, using_threads
from pyquant.report.records.environment import FAKED
from pyquant.report.records.figures import figures_of
from pyquant.report.registry import render, write_files

HELP = "layers of a language model: prompt and decode, all candidates side by side"
_EXAMPLES = """\
examples:
  pyquant bench decode --config llama-3-8b --layers 2
  pyquant bench decode --device cuda --batch 1 2 4 8 16 32 --prompt 512 --json decode.json
  pyquant bench decode --config tiny --clock faked

weights are random; tokens a second are those of the layers that run, without embeddings and output head.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times decoder layers with a KV cache in interleaved rounds of one run: bf16, pyquant with merged "
        "projections, torch's int4 op, and torchao where it is installed."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--config", choices=tuple(CONFIGS), default="llama-3-8b", help="sizes of layers (default: llama-3-8b)")
    add("--layers", type=int, default=2, metavar="N", help="how many (default: 2)")
    add("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="sequences (default: 1 8 32)")
    add("--prompt", type=int, default=128, metavar="T", help="tokens of each (default: 128)")
    add("--schemes", nargs="+", default=list(SCHEMES), metavar="SCHEME", help="of pyquant, that run in integers")
    add("--candidates", nargs="+", metavar="NAME", help="by part of their name (default: all; bf16 always)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: cpu)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the machine's)")
    add(
        "--clock", choices=("cpu", "wall", "cuda-events", FAKED), help="default: wall, cpu with one thread; cuda-events"
    )
    add("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    add("--json", metavar="FILE", help="write the figures as JSON")
    add("--markdown", metavar="FILE", help="write the tables")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints Markdown. -> 0, or 1 when nothing of pyquant ran."""
    numbers = [("--batch", batch) for batch in args.batch]
    numbers += [("--layers", args.layers), ("--prompt", args.prompt), ("--rounds", args.rounds)]
    for option, value in numbers:
        arguments.whole(option, value, 1)
    threads = torch.get_num_threads() if args.threads is None else arguments.whole("--threads", args.threads, 1)
    on_gpu = args.device.startswith("cuda")
    if args.device != "cpu" and not on_gpu:
        raise ArgumentError("--device", args.device, "cpu, cuda, cuda:1 ...")
    if args.clock not in (None, FAKED) and on_gpu != args.clock.startswith("cuda"):
        raise ArgumentError("--clock", args.clock, "cuda-events" if on_gpu else "cpu, wall")
    bench = DecodeBench(
        config=args.config,
        layers=args.layers,
        batches=args.batch,
        prompt=args.prompt,
        schemes=args.schemes,
        candidates=args.candidates,
        device=select_device(args.device) if on_gpu else "cpu",
        clock=args.clock or ("cuda-events" if on_gpu else default_clock(threads)),
        rounds=args.rounds,
    )
    cases = len(candidates_of(bench.schemes)) + 2 * len(bench.batches)
    with using_threads(threads), ProgressBar("bench decode", cases) as shown:
        report = run_decode_bench(bench, on_case=shown.step)
    figures = figures_of(report)
    print(render(figures, "md").decode(), end="")
    write_files(figures, json=args.json, md=args.markdown)
    return 0 if any(row.candidate.startswith("pyquant") for row in report.rows) else 1
