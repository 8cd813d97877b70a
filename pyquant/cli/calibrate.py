"""`pyquant calibrate MODEL --data FN --recipe R`: run data through a model, write the ranges that its recipe needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyquant.cli.models import MODEL_HELP, load_batches, model_factory
from pyquant.cli.outputs import check_file, check_folder
from pyquant.cli.progress import ProgressBar
from pyquant.errors import ArgumentError
from pyquant.report.render import table

DATA_HELP = (
    "package.module:callable without arguments that returns an iterable of batches: tensors, tuples whose first item "
    "is the input, or mappings of keyword arguments; or, with the folder of a Hugging Face model, a text file: at "
    "most 128 windows of 512 tokens of it"
)
_EXAMPLES = """\
examples:
  pyquant calibrate mypackage.models:build --data mypackage.data:calibration --recipe recipe.yaml
  pyquant quantize mypackage.models:build --recipe recipe.yaml --calibration calibration.json --out quantised
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Builds a model, prepares it as the recipe says, runs exactly num_calib_batches batches, and "
        "writes the range of every static tensor."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("--data", required=True, metavar="FN", help=DATA_HELP)
    add("--recipe", required=True, metavar="FILE", help="recipe: YAML, TOML or JSON")
    add(
        "--out",
        default="calibration.json",
        metavar="PATH",
        help="file that ends in .json, or a folder for calibration.json; default %(default)s",
    )
    add(
        "--plots",
        metavar="FOLDER",
        help="write a picture of each tensor: its histogram and every method's range (takes the batches once more; "
        "matplotlib)",
    )


def run(args: argparse.Namespace) -> int:
    """Calibrates and writes. -> 0. Raises ArgumentError, CalibrationError, or what building the model raises."""
    from pyquant.ptq import calibrate_recipe_, prepare_
    from pyquant.ptq.ranges_file import save_ranges
    from pyquant.recipe import Recipe
    from pyquant.simulate.calibrate import targets_of

    is_file = Path(args.out).suffix == ".json" and not Path(args.out).is_dir()
    check_file("--out", args.out, (".json",)) if is_file else check_folder("--out", args.out)
    factory, data = model_factory(args.model), load_batches(args.data, "--data", args.model)
    recipe = Recipe.load(args.recipe)  # last: it may name what the two modules register
    with ProgressBar("calibrate", recipe.calib_params.num_calib_batches + 1) as shown:
        shown.step("building the model")
        model = prepare_(factory(), recipe)
        ranges = calibrate_recipe_(model, recipe, counted(data(), shown))
    if not ranges:
        raise ArgumentError("--recipe", f"{args.recipe}: no static tensor", "a scheme that needs ranges, such as W8A8")
    file = save_ranges(args.out, ranges, recipe)
    methods = {t.name: t.fake.scheme.calibrator for t in targets_of(model)}
    rows = [[n, methods[n], f"{r.low.min().item():.6g}", f"{r.high.max().item():.6g}"] for n, r in ranges.items()]
    print(table(["tensor", "method", "low", "high"], rows))
    print(f"saved in {file}")
    if args.plots:
        print(f"{len(_pictures(model, recipe, data, args.plots))} pictures in {args.plots}")
    return 0


def _pictures(model: Any, recipe: Any, data: Any, folder: str) -> list[Any]:
    """A picture of every tensor, with the ranges just found as those in use."""
    from pyquant.ptq import QuantizationCalibrator
    from pyquant.report.plot_calibration import plot_tensors

    params = recipe.calib_params
    histograms = QuantizationCalibrator().histograms(
        model, data(), num_calib_batches=params.num_calib_batches, percentile=params.percentile
    )
    return plot_tensors(histograms, folder)


def counted(batches: Iterable[Any], shown: ProgressBar) -> Iterable[Any]:
    """The batches, with a step of progress for each."""
    for batch in batches:
        shown.step("running batches")
        yield batch
