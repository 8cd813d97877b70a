"""`pyquant tune`: measures the user's layers on their GPU and remembers the quickest kernels."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pyquant.bench.model_shapes import parse_kn
from pyquant.cli.progress import ProgressBar
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS_BY_NAME
from pyquant.errors import ArgumentError
from pyquant.io.atomic import SaveDirectory
from pyquant.measure.environment import describe_environment
from pyquant.measure.tune import Layer, Rig, TuneOutcome, problems_for, time_layers, tune
from pyquant.ops import tuned

_EXAMPLES = """\
examples:
  pyquant tune --model quantised
  pyquant tune --shapes 4096x4096 11008x4096 --m 1 16 64 512 --schemes W8A8Dynamic "W4A8Dynamic(group_size=128)"
  pyquant tune --model quantised --layers --residual
  pyquant tune --shapes 4096x4096 --dry-run --json

The table is in PYQUANT_CACHE, else pyquant in XDG_CACHE_HOME, else ~/.cache/pyquant; delete it to forget. A choice
of kernels changes the time of an integer layer and never its bits; of weight-only and 16-bit layers the last bits may
move too, within their bound.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times every kernel that the cost model thinks close to the best, after checking its result, and "
        "writes the quickest into a table of the user's cache, which every later process follows."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--model", metavar="DIR", help="folder of a quantised model: its layers are measured")
    add("--shapes", nargs="+", default=[], metavar="NxK", help="out_features x in_features")
    add(
        "--m",
        type=int,
        nargs="+",
        default=[1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096],
        metavar="M",
        help="rows; each stands for its bucket (default: 1 8 16 ... 4096)",
    )
    add(
        "--schemes",
        nargs="+",
        default=["W8A8Dynamic"],
        metavar="SCHEME",
        help="of --shapes: any preset (default: W8A8Dynamic)",
    )
    add("--dtype", choices=FLOATS_BY_NAME, default="bfloat16", help="input and output (default: bfloat16)")
    add("--residual", action="store_true", help="also with a residual added, as the last layer of a block has it")
    add(
        "--layers",
        action="store_true",
        help="also time whole layers, quantiser and launches included, against torch's Linear: what auto_ decides by",
    )
    add("--graph", action="store_true", help="with --layers: as in a CUDA graph, without the gaps between launches")
    add("--device", type=int, default=0, metavar="INDEX", help="CUDA device (default: 0)")
    add("--rounds", type=int, default=15, metavar="N", help="interleaved rounds (default: 15)")
    add("--dry-run", action="store_true", help="measure and report, write nothing")
    add("--json", action="store_true", help="print the outcomes as JSON")


def run(args: argparse.Namespace) -> int:
    """Measures, prints what changed, writes the table. -> 0, or 1 when a kernel's result was wrong."""
    arguments.whole("--rounds", args.rounds, 1)
    rows = [arguments.whole("--m", m, 1) for m in args.m]
    if args.graph and not args.layers:
        raise ArgumentError("--graph", "given without --layers", "together with --layers")
    layers = [] if args.model else _layers(args)  # a machine without a GPU need not read a model
    clock = "cuda-graph" if args.graph else "cuda-events"
    dtype = FLOATS_BY_NAME[args.dtype]
    if layers:  # what is wrong with the arguments is told without a GPU, too
        problems_for(layers, rows[:1], dtype)
    rig = make_rig(args.device, clock)
    layers = layers or _layers(args)
    problems = problems_for(layers, rows, dtype, rig.device, residuals=args.residual)
    with ProgressBar("tune", len(problems)) as shown:
        outcomes = tune(
            problems, rig, rounds=args.rounds, on_problem=lambda p: shown.step("M={m} N={n} K={k}".format(**p))
        )
    whole: list[tuned.LayerChoice] = []
    untimed: dict[str, str] = {}
    if args.layers:
        with ProgressBar("whole layers", len(layers) * len(rows)) as shown:
            each = partial(_show_layer, shown)
            whole, untimed = time_layers(layers, rows, dtype, rig, rounds=args.rounds, on_layer=each)  # type: ignore[arg-type]
    path = None if args.dry_run else save(str(rig.device["name"]), outcomes, whole, clock)
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes] + [asdict(one) for one in whole], indent=1))
    else:
        print(report(outcomes))
        if args.layers:
            print(report_of_layers(whole, untimed))
        print(f"written to {path}" if path else "dry run: nothing written")
    told = [*(why for o in outcomes for why in o.dropped.values()), *untimed.values()]
    return 1 if any("differs" in why for why in told) else 0


def _show_layer(shown: ProgressBar, m: int, n: int, k: int) -> None:
    shown.step(f"M={m} N={n} K={k}")


def make_rig(index: int, layer_clock: str) -> Rig:
    """The device to measure on; UnsupportedError without a GPU."""
    from pyquant.measure.tune_rig import GpuRig

    return GpuRig(index, layer_clock)


def save(
    gpu: str, outcomes: Sequence[TuneOutcome], layers: Sequence[tuned.LayerChoice] = (), layer_clock: str = ""
) -> Path:
    """Merges the choices into the user's table, whole or not at all, and follows it in this process. -> its path.

    Raises CheckpointError when another process is writing it, or what is there is no table of ours.
    """
    folder, environment = tuned.cache_folder(), describe_environment("cpu")
    with SaveDirectory(folder) as directory:
        there = directory.read(tuned.FILE, tuned.MAX_BYTES)
        table = tuned.Table() if there is None else tuned.parse(there, str(folder / tuned.FILE))
        note = {"pyquant": environment.pyquant, "torch": environment.torch, "cuda": environment.cuda}
        note |= {"layer_clock": layer_clock} if layers else {}
        table.add(gpu, [o.choice for o in outcomes if o.choice is not None], note, layers)
        directory.publish(directory.stage(tuned.dumps(table)), tuned.FILE)
        directory.sync()
    tuned.activate(tuned.load())
    return folder / tuned.FILE


def report(outcomes: Sequence[TuneOutcome]) -> str:
    """A line a problem: what is the quickest, against the model's choice and an earlier table's; then what was left
    out and why."""
    from pyquant.report.render import table

    rows = [_row(outcome) for outcome in outcomes]
    head = ["types", "M", "N", "K", "quickest", "us", "the model's choice", "times slower", "changed"]
    dropped = [
        f"{name} at M={o.problem['m']} N={o.problem['n']} K={o.problem['k']}: {why}"
        for o in outcomes
        for name, why in o.dropped.items()
    ]
    changed = sum(row[-1] != "" for row in rows)
    return "\n".join([table(head, rows), "", f"{changed} of {len(rows)} choices changed", *dropped])


def report_of_layers(layers: Sequence[tuned.LayerChoice], untimed: Mapping[str, str]) -> str:
    """A line a whole layer: its time, torch's, and how many times faster it is; then what was not timed, and why."""
    from pyquant.report.render import table

    rows = []
    for one in layers:
        group = f" group {one.group_size}" if one.group_size else ""
        types = f"{one.inputs} x {one.weights}{group}"
        times = [f"{one.us:.1f}", f"{one.float_us:.1f}", f"{one.float_us / one.us:.2f}" if one.us else ""]
        rows.append([types, str(one.m), str(one.n), str(one.k), *times])
    head = ["whole layers", "M", "N", "K", "us", "torch's us", "times faster"]
    return "\n".join(["", table(head, rows), *(f"{what}: {why}" for what, why in untimed.items())])


def _row(outcome: TuneOutcome) -> list[str]:
    p, choice = outcome.problem, outcome.choice
    group = f" group {p['group_size']}" if p.get("group_size") else ""
    group += " + residual" if "residual" in p else ""
    where = [f"{p.get('x', 's8')} x {p.get('w', 's8')}{group}", str(p["m"]), str(p["n"]), str(p["k"])]
    if choice is None:
        return [*where, "nothing ran", "", "", "", ""]
    ratio = f"{choice.model_us / choice.us:.2f}" if choice.us and choice.model_us else ""
    old = outcome.before or choice.model_row
    return [*where, choice.row, f"{choice.us:.1f}", choice.model_row, ratio, "" if old == choice.row else f"was {old}"]


def _layers(args: argparse.Namespace) -> list[Layer]:
    layers: list[Layer] = [
        (*parse_kn(text, "--shapes", "out_features x in_features, such as 4096x1024"), scheme)
        for text in args.shapes
        for scheme in args.schemes
    ]
    if args.model:
        layers += _layers_of(args.model)
    if not layers:
        raise ArgumentError("--shapes", "nothing to measure", "--shapes NxK ..., or --model DIR with integer layers")
    return layers


def _layers_of(folder: str) -> list[Layer]:
    from pyquant.io.checkpoint import read_manifest

    layers = read_manifest(folder).layers.values()
    return [(layer.out_features, layer.in_features, layer.scheme) for layer in layers if layer.kind == "linear"]
