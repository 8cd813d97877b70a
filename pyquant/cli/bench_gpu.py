"""`pyquant bench gemm --device cuda`: the grid, its slices, what a killed run left, and the files that come out."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pyquant.bench.gpu_gemm import DeviceLost, GpuBench, run_gpu_bench, slice_of
from pyquant.bench.kernels import ADAPTERS, find_adapters
from pyquant.bench.kernels.rows import native, rows_matching
from pyquant.bench.kernels.torch_own import MM_BF16
from pyquant.bench.model_shapes import MODELS, MS, shapes_of
from pyquant.bench.partial import Partial, Shape, merge
from pyquant.bench.peers import at
from pyquant.cli.progress import ProgressBar
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment, library_digest
from pyquant.measure.floors import measure_ceilings
from pyquant.measure.gpu_timing import ROTATE_BYTES
from pyquant.report.gemm import gemm_markdown
from pyquant.report.records.bench import GemmReport
from pyquant.report.records.environment import FAKED
from pyquant.report.registry import write_files, write_possible
from pyquant.report.render import write_text

UNFINISHED = 3
_NOTES = [
    "weights rotate over copies that together exceed the last cache; inputs stay where they are",
    "ratio: baseline time / candidate time, median over interleaved rounds of one run; a chain counts as two products",
    "checked in this run: every result against the float64 product, pyquant's integer ones bit by bit",
    "floor: max(bytes / measured copy bandwidth, operations / measured peak of the type)",
]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only a GPU benchmark takes."""
    add = parser.add_argument_group("with --device cuda").add_argument
    add("--models", nargs="+", metavar="NAME", help=f"shapes of: {', '.join(MODELS)} (default: all of them)")
    add("--candidates", nargs="+", metavar="NAME", help="by part of their name (default: all)")
    add("--rows", metavar="REGEX", help="also every compiled row of the kernel table whose name matches")
    add("--out", metavar="DIR", help="write gemm.json, .csv, .md, .png there, and go on with what it holds")
    add("--energy", action="store_true", default=None, help="also millijoules a call, by NVML's counter: a second each")
    add("--slice", metavar="I/N", help="the I-th of N parts of the shapes; --merge puts them together")
    add("--time-budget", type=float, metavar="S", help="start no shape after S seconds; exit code 3")
    add("--merge", nargs="+", metavar="FILE", help="only merge reports of slices (gemm-1of3.json ...); needs no GPU")


def given(args: argparse.Namespace) -> list[str]:
    """The GPU options that were given, as spelt on the command line."""
    names = ("models", "candidates", "rows", "out", "energy", "slice", "time_budget", "merge")
    return ["--" + name.replace("_", "-") for name in names if getattr(args, name) is not None]


def run(args: argparse.Namespace, kn: Sequence[tuple[int, int]] | None) -> int:
    """Measures (or merges) and writes. -> 0, 1 when a bit is wrong or nothing of ours ran, 3 when shapes are left."""
    if args.merge:
        return _verdict(_finish(args, merge(args.merge), "merged"))
    bench = bench_of(args, kn, "cpu" if args.clock == FAKED else select_device(args.device))
    part = _slice(args.slice)
    shapes = slice_of(bench.shapes, *part)
    environment = describe_environment(bench.device, clock=bench.clock)
    key = {
        "gpu": environment.gpu,
        "driver": environment.driver,
        "torch": environment.torch,
        "libraries": library_digest(),
        "clock": bench.clock,
        "rounds": bench.rounds,
        "candidates": [adapter.name for adapter in bench.adapters],
        **({"energy": True} if bench.energy else {}),
    }
    environment = replace(environment, packages={**environment.packages, "libraries": library_digest()})
    journal = None if args.out is None else Path(args.out) / f"gemm.partial{_suffix(part)}.jsonl"
    with Partial(key, environment, journal) as record:
        _measure(args, bench, shapes, record)
        report = replace(record.report(MM_BF16), notes=list(_NOTES))
        report = _finish(args, report, _suffix(part).removeprefix("-") or "whole", part)
    done = sum(shape in record.cells for shape in shapes)
    if done < len(shapes):
        again = "the same command goes on" if args.out else "give --out to be able to go on"
        print(f"{done} of {len(shapes)} shapes are done; {again}", file=sys.stderr)
        return 1 if any(row.exact is False for row in report.rows) else UNFINISHED
    return _verdict(report)


def _measure(args: argparse.Namespace, bench: GpuBench, shapes: Sequence[Shape], record: Partial) -> None:
    """Adds the shapes that the record lacks, until the time is over or the device is lost."""
    deadline = None if args.time_budget is None else time.monotonic() + args.time_budget
    remaining = sum(shape not in record.cells for shape in shapes)
    if not remaining:
        return
    with ProgressBar("bench gemm", remaining + 1) as shown:
        if not args.no_floor and bench.clock != FAKED:
            shown.step("limits of the machine: copy, bf16, fp16, int8, fp8 at 8192^3")
            record.add_ceilings(measure_ceilings(bench.device))
        try:
            run_gpu_bench(
                replace(bench, shapes=shapes),
                record,
                ceilings=record.ceilings,
                deadline=deadline,
                on_shape=lambda shape: shown.step(at(shape)),
            )
        except DeviceLost as lost:
            print(f"pyquant: {lost}", file=sys.stderr)


def select_device(name: str) -> str:
    """Makes a CUDA device the current one. -> its name; ArgumentError where torch sees none of that name."""
    allowed = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if name not in ("cuda", *allowed) or not allowed:
        raise ArgumentError("--device", name, "a device that torch can use here: " + ", ".join(["cpu", *allowed]))
    if name != "cuda":  # which is the current one, and which set_device refuses for want of an index
        torch.cuda.set_device(name)
    return name


def bench_of(args: argparse.Namespace, kn: Sequence[tuple[int, int]] | None, device: str) -> GpuBench:
    """The benchmark that the arguments describe. Raises ArgumentError naming the option that is wrong."""
    adapters = find_adapters([MM_BF16, *args.candidates]) if args.candidates else list(ADAPTERS)
    if args.rows:
        adapters += rows_matching(args.rows, native().kernel_table())
    sizes = list(kn) if kn else shapes_of(args.models or MODELS)
    return GpuBench(
        [(m, *pair) for pair in sizes for m in (args.m or MS)],
        adapters,
        device=device,
        clock=args.clock or "cuda-graph",
        rounds=args.rounds,
        rotate_bytes=0 if args.clock == FAKED else ROTATE_BYTES,
        energy=bool(args.energy),
    )


def _slice(text: str | None) -> tuple[int, int]:
    part, _, parts = (text or "1/1").partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ArgumentError("--slice", repr(text), "I/N with 1 <= I <= N, such as 1/3")
    return int(part), int(parts)


def _suffix(part: tuple[int, int]) -> str:
    return "" if part[1] == 1 else f"-{part[0]}of{part[1]}"


def _verdict(report: GemmReport) -> int:
    """Exit code: 1 when no pyquant row was measured (a run that did nothing is a failure) or a bit was wrong."""
    if not any(row.ours for row in report.rows):
        print("no pyquant kernel was measured", file=sys.stderr)
        return 1
    return 1 if any(row.exact is False for row in report.rows) else 0


def _finish(args: argparse.Namespace, report: GemmReport, what: str, part: tuple[int, int] = (1, 1)) -> GemmReport:
    markdown = gemm_markdown(report, f"Linear layers on {report.environment.gpu or 'an unknown GPU'} ({what})")
    print(markdown, end="")
    write_files(report, json=args.json, csv=args.csv)
    if args.out is not None:
        stem = f"gemm{_suffix(part)}"
        _, left_out = write_possible(report, args.out, stem)
        write_text(Path(args.out) / f"{stem}.md", markdown)
        if left_out:
            print(left_out, file=sys.stderr)
    write_files(report, png=args.plot)
    return report
