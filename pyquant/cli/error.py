"""`pyquant error DIR --against MODEL --data FN`: what quantisation changes in every tensor, on the user's data."""

from __future__ import annotations

import argparse

from pyquant.cli.calibrate import DATA_HELP, counted
from pyquant.cli.models import MODEL_HELP, load_batches, model_factory, usual_batches
from pyquant.cli.options import check_batches
from pyquant.cli.outputs import check_file
from pyquant.cli.progress import ProgressBar

_EXAMPLES = """\
examples:
  pyquant error quantised --against mypackage.models:build --data mypackage.data:batches
  pyquant error quantised --against mypackage.models:build --data mypackage.data:batches --out errors.csv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a saved model and the float model that it was made of on the same batches: MAE, MSE, SQNR, "
        "cosine and largest error of the weights, inputs and results of every layer, the share of clipped numbers, and "
        "the divergence of the results' histograms."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("directory", metavar="DIR", help="a folder that `pyquant quantize` or save_pretrained wrote")
    add("--against", required=True, metavar="MODEL", help=f"the float model: {MODEL_HELP}")
    add("--data", required=True, metavar="FN", help=DATA_HELP)
    add("--batches", type=int, metavar="N", help="so many batches; default: 16, or all of fewer")
    add("--out", metavar="FILE", help="write a .md, .csv or .json file as well")


def run(args: argparse.Namespace) -> int:
    """Prints the table. -> 0. Raises CheckpointError for damaged files, ArgumentError."""
    import pyquant
    from pyquant.mixed_precision.loss.layer_errors import error_report
    from pyquant.report.error import error_table, write_errors

    check_batches(args)
    check_file("--out", args.out, (".md", ".csv", ".json"))
    factory, data = (
        model_factory(args.against, "--against"),
        load_batches(args.data, "--data", args.against, "--against"),
    )
    model = pyquant.load_pretrained(args.directory, factory)
    batches, count = usual_batches(data(), args.batches)
    with ProgressBar("error", max(count, 1)) as shown:
        report = error_report(model, factory(), counted(batches, shown), count)
    written = write_errors(report, args.out) if args.out else None  # first: who reads the table may stop
    print(error_table(report))
    if written:
        print(f"written: {written}")
    return 0
