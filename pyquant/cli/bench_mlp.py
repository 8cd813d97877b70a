"""`pyquant bench mlp`: the founding experiment, every configuration of float, int8 and int4 in a perceptron."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pyquant.bench.mlp import COLUMNS, END_TO_END, KERNEL, MlpBench, run_mlp_bench, trade_off_of
from pyquant.bench.mlp_net import BATCH, CAPACITIES, SIZES, all_configs, parse_config, parse_sizes, scaled
from pyquant.cli.bench_gpu import select_device
from pyquant.cli.progress import ProgressBar
from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.measure.gpu_timing import CudaGraphClock, TorchCuda
from pyquant.measure.timing import Clock, default_clock, make_clock, using_threads
from pyquant.report import registry
from pyquant.report.records.environment import FAKED
from pyquant.report.trade_off import to_markdown

STEMS = {KERNEL: "mlp", END_TO_END: "mlp_end_to_end"}
CPU_SCALE, CPU_BATCH = 32, 128
_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
HELP = "the latency of all 729 configurations of a six-layer perceptron"
_EXAMPLES = """\
examples:
  pyquant bench mlp --out results
  pyquant bench mlp --scale 16 --batch-size 64
  pyquant bench mlp --nn-config float,s8,s4,int8,int4,float
  pyquant bench mlp --device cuda --out results

Writes mlp.* (the products alone, inputs ready) and mlp_end_to_end.* (floats in, floats out) to --out: JSON, Markdown,
CSV, PNG, SVG and an interactive page. A run that is killed goes on with the rounds that its --out folder holds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Builds every layer in every format, checks every configuration's results, times all of them in "
        "interleaved rounds, and draws latency against representational capacity."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all-configs", action="store_true", help="every configuration (the default)")
    which.add_argument(
        "--nn-config", metavar="F,F,..", help="one: a format for each layer, float, int8 (s8) or int4 (s4)"
    )
    add(
        "--nn-size",
        metavar="N,N,..",
        default=",".join(map(str, SIZES)),
        help="activation dimensions (default: %(default)s)",
    )
    add("--scale", type=int, metavar="S", help=f"divide the dimensions (default: {CPU_SCALE}; on a GPU 1)")
    add("--batch-size", type=int, metavar="M", help=f"rows (default: {CPU_BATCH}; on a GPU {BATCH})")
    add("--runs", type=int, default=30, metavar="N", help="forward passes of each (default: 30)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, inputs and order (default: 0)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: cpu)")
    add("--float-type", choices=_TYPES, help="of float layers (default: bfloat16; on a GPU float16)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the machine's)")
    add(
        "--clock",
        choices=("cpu", "wall", "cuda-events", "cuda-graph", "faked"),
        help="default: wall, cpu with one thread; on a GPU a replayed graph; faked: a dry run, without a GPU too",
    )
    add("--capacity", choices=CAPACITIES, default="output", help="dimensions that count (default: output)")
    add("--out", metavar="DIR", help="write the results there")


def run(args: argparse.Namespace) -> int:
    """Measures, writes and prints Markdown. -> 0; a wrong result is an error before anything is timed."""
    bench, clock = bench_from_args(args), clock_from_args(args)
    with using_threads(args.threads):
        environment = describe_environment(bench.device, clock=clock.name)
        journal = None if args.out is None else Path(args.out) / "mlp_rounds.jsonl"
        with ProgressBar("bench mlp", bench.steps) as shown:
            result = run_mlp_bench(bench, clock, environment=environment, journal=journal, on_step=shown.step)
    records = {column: trade_off_of(result, column, environment, args.capacity) for column in COLUMNS}
    print("\n".join(to_markdown(record) for record in records.values()), end="")
    if args.out:
        for column, record in records.items():
            registry.write(record, args.out, STEMS[column])
    return 0


def bench_from_args(args: argparse.Namespace) -> MlpBench:
    """The experiment that the arguments describe. Raises ArgumentError naming the option that is wrong."""
    on_gpu = args.device.startswith("cuda")
    if not on_gpu and args.device != "cpu":
        raise ArgumentError("--device", args.device, "cpu, cuda, cuda:1 ...")
    for option, value in (("--batch-size", args.batch_size), ("--runs", args.runs), ("--threads", args.threads)):
        if value is not None:
            arguments.whole(option, value, 1)
    scale = args.scale if args.scale is not None else 1 if on_gpu else CPU_SCALE
    sizes = scaled(parse_sizes(args.nn_size), scale)
    layers = len(sizes) - 1
    configs = all_configs(layers) if args.nn_config is None else [parse_config(args.nn_config, layers)]
    return MlpBench(
        sizes,
        args.batch_size or (BATCH if on_gpu else CPU_BATCH),
        tuple(configs),
        args.runs,
        select_device(args.device) if on_gpu and args.clock != FAKED else "cpu",
        _TYPES[args.float_type or ("float16" if on_gpu else "bfloat16")],
        args.seed,
    )


def clock_from_args(args: argparse.Namespace) -> Clock:
    """The clock. Raises ArgumentError for one of the other kind of device, or CPU time of several threads."""
    on_gpu = args.device.startswith("cuda")
    threads = args.threads or torch.get_num_threads()
    name = args.clock or ("cuda-graph" if on_gpu else default_clock(threads))
    if name == FAKED:
        return make_clock(name)
    if name.startswith("cuda") != on_gpu:
        raise ArgumentError("--clock", name, "cuda-graph, cuda-events" if on_gpu else "cpu, wall")
    if name == "cpu" and threads > 1:
        raise ArgumentError("--threads", threads, "1 with --clock cpu, which adds up the time of all threads")
    return CudaGraphClock(TorchCuda(one_pool=True)) if name == "cuda-graph" else make_clock(name)
