"""`pyquant bench qat`: fake quantisers and training steps next to their rivals."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Final

import torch

from pyquant.bench.qat import GRANULARITIES, QatBench, run_qat_bench
from pyquant.bench.qat_steps import MODELS
from pyquant.cli.progress import ProgressBar
from pyquant.core import arguments
from pyquant.measure.timing import default_clock, using_threads
from pyquant.report.qat import qat_markdown
from pyquant.report.registry import write_files

# With glibc's defaults a 64 MB tensor is mapped and unmapped at every call, and most of what is timed are page faults.
# These keep the heap's pages, as training with kept buffers or another allocator does.
KEPT: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(1 << 30),
}
_MARK: Final = "PYQUANT_BENCH_CHILD"

HELP = "fake quantisation, forward and backward, all candidates side by side"
_EXAMPLES = """\
examples:
  pyquant bench qat
  pyquant bench qat --elements 300000 --granularity per_tensor --rounds 15
  pyquant bench qat --step mlp transformer --json steps.json
  pyquant bench qat --allocator default

every candidate's result is checked before it is timed. the machine's threads and wall time are the default, as for
bench gemm; --threads 1 counts CPU time.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times fake quantisers (or, with --step, whole training steps) in interleaved rounds of one run "
        "and prints the time, and its ratio to a clone (to the plain fp32 step)."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--elements", type=int, nargs="+", metavar="N", help="sizes (default: 262144 16777216)")
    add("--granularity", nargs="+", choices=GRANULARITIES, help="default: both")
    add("--step", nargs="+", choices=tuple(MODELS), help="training steps instead of single passes")
    add("--candidates", nargs="+", metavar="NAME", help="by part of their name (default: all)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: the machine's)")
    add("--clock", choices=("cpu", "wall"), help="default: wall, cpu with one thread")
    add("--rounds", type=int, default=9, metavar="N", help="interleaved rounds (default: 9)")
    add(
        "--allocator",
        choices=("kept", "default"),
        default="kept",
        help="kept: in a child process whose C heap keeps its pages (default)",
    )
    add("--json", metavar="FILE", help="write the records as JSON")
    add("--markdown", metavar="FILE", help="write the tables")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark, in a child where the allocator's environment must be set. -> 0, or the child's exit code."""
    threads = torch.get_num_threads() if args.threads is None else args.threads
    for option, value in (*(("--elements", n) for n in args.elements or ()), ("--threads", threads)):
        arguments.whole(option, value, 1)
    bench = QatBench(
        elements=args.elements or QatBench.elements,
        granularities=args.granularity or GRANULARITIES,
        candidates=args.candidates,
        steps=args.step or (),
        clock=args.clock or default_clock(threads),
        rounds=arguments.whole("--rounds", args.rounds, 1),
        allocator=args.allocator,
    )
    if args.allocator == "kept" and os.environ.get(_MARK) != "1":
        command = [sys.executable, "-m", "pyquant", "bench", "qat", *_words(args)]
        return subprocess.run(command, env={**os.environ, **KEPT, _MARK: "1"}, check=False).returncode
    with using_threads(threads):
        cases = len(bench.steps) or len(bench.elements) * len(bench.granularities)
        with ProgressBar("bench qat", cases) as shown:
            report = run_qat_bench(bench, on_case=shown.step)
    print(qat_markdown(report), end="")
    write_files(report, json=args.json, md=args.markdown)
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """The options of a parsed command, for the child process."""
    words = []
    for name in (
        "elements",
        "granularity",
        "step",
        "candidates",
        "threads",
        "clock",
        "rounds",
        "allocator",
        "json",
        "markdown",
    ):
        value = getattr(args, name)
        if value is not None:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words
