"""`pyquant bench calib`: what calibration costs, and the ranges that every method finds on known data."""

from __future__ import annotations

import argparse

from pyquant.bench.calib import DATA, METHODS, calib_data, observed, run_calib_bench
from pyquant.cli.progress import ProgressBar
from pyquant.core import arguments
from pyquant.measure.timing import using_threads
from pyquant.report import registry
from pyquant.report.calibration_bench import calib_markdown
from pyquant.report.render import table

HELP = "collecting statistics and searching ranges"
_EXAMPLES = """\
examples:
  pyquant bench calib
  pyquant bench calib --out bench/results/cpu-mine
  pyquant bench calib --plot laplace.png --data laplace --bits 4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times histogram collection beside its rivals and every search, and prints the "
        "amax and SQNR of every method on five known distributions."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--rounds", type=int, default=15, metavar="N", help="interleaved rounds (default: 15)")
    add("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    add("--out", metavar="DIR", help="write calib.md and calib.json there")
    add("--plot", metavar="FILE.png", help="only draw a histogram with every method's amax")
    add("--data", choices=DATA, default="laplace", help="of --plot (default: laplace)")
    add("--bits", type=int, choices=(4, 8), default=8, help="of --plot (default: 8)")


def run(args: argparse.Namespace) -> int:
    """-> 0, or 1 when a bar was missed."""
    arguments.whole("--rounds", args.rounds, 1)
    arguments.whole("--threads", 1 if args.threads is None else args.threads, 1)
    if args.plot:
        return _plot(args)
    with using_threads(args.threads), ProgressBar("bench calib", 5 + 2 * len(METHODS)) as shown:
        report = run_calib_bench(args.rounds, on_step=shown.step)
    print(calib_markdown(report), end="")
    if args.out:
        registry.write(report, args.out, "calib", ("md", "json"))
    return 0 if all(bar.passed for bar in report.bars) else 1


def _plot(args: argparse.Namespace) -> int:
    from pyquant.calibrate import compare, linear_histogram
    from pyquant.core.scheme import TensorScheme
    from pyquant.measure.environment import describe_environment
    from pyquant.report.plot_calibration import plot_calibration

    statistics = observed(calib_data(args.data))
    records = compare(statistics, TensorScheme(bits=args.bits))
    rows = [[r.method, f"{r.amax:.4f}", f"{r.sqnr_db:.2f}"] for r in records]
    print(table(["method", "amax", "SQNR [dB]"], rows), flush=True)  # before what needs matplotlib
    title = f"{args.data}, {statistics.count} numbers, int{args.bits} symmetric"
    plot_calibration(
        *linear_histogram(statistics), records, args.plot, title=title, caption=describe_environment().line()
    )
    print(f"wrote {args.plot}")
    return 0
