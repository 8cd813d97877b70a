"""`pyquant sensitivity MODEL --data FN`: which layers suffer by which format, and which to keep in floating point."""

from __future__ import annotations

import argparse
from itertools import islice

from pyquant.cli.calibrate import DATA_HELP
from pyquant.cli.models import MODEL_HELP, load_batches, load_eval, model_factory, usual_batches
from pyquant.cli.options import add_formats, check_batches, formats_of
from pyquant.cli.outputs import check_folder
from pyquant.cli.progress import ProgressBar
from pyquant.core import arguments
from pyquant.core.names import OUTPUT_METRICS
from pyquant.core.registry import SCORERS
from pyquant.errors import ArgumentError
from pyquant.report import registry
from pyquant.report.records.sensitivity import SensitivityReport

_FILES = "sensitivity"
_MODES = {"one-at-a-time": "one_at_a_time", "leave-one-out": "leave_one_out", "cumulative": "cumulative"}
_EXAMPLES = """\
examples:
  pyquant sensitivity mypackage.models:build --data mypackage.data:batches
  pyquant sensitivity mypackage.models:build --data mypackage.data:batches --metric fisher --max-drop 0.01
  pyquant sensitivity mypackage.models:build --data mypackage.data:batches --eval mypackage.data:accuracy \\
      --mode cumulative --by task --max-drop 0.01 --out sensitivity --journal sensitivity.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Builds a model with every layer in every format, says what the analysis costs, measures what each "
        "group of layers loses, and names the layers to keep in floating point."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("--data", required=True, metavar="FN", help=DATA_HELP)
    add("--held-out", metavar="FN", help="as --data: batches to score on (default: those that calibrate)")
    add("--eval", metavar="FN", help="package.module:callable of the model that returns a number, such as an accuracy")
    add("--lower-is-better", action="store_true", help="of --eval: it is an error, not an accuracy")
    add_formats(parser)
    add("--metric", default="kl", metavar="NAME", help=f"{', '.join(SCORERS)}; default: %(default)s")
    add("--mode", default="one-at-a-time", choices=_MODES, help="default: %(default)s")
    add("--loss", default="kl", choices=OUTPUT_METRICS, help="behind noise, fisher, hessian, cumulative; default: kl")
    add("--grouping", default="auto", choices=("auto", "none"), help="auto: q/k/v and gate/up share a format (default)")
    add("--batches", type=int, metavar="N", help="batches of --data (default: 16, or all of fewer)")
    add("--repeats", type=int, metavar="N", help="draws of noise, fisher and hessian (default: the metric's own)")
    add("--seed", type=int, default=0, metavar="N", help="of those draws (default: 0)")
    add("--max-drop", type=float, metavar="X", help="print the layers to skip so that the rest loses at most X")
    add("--by", default="loss", choices=("loss", "task"), help="what --max-drop is about: the metric, or --eval")
    add("--latency", metavar="FILE", help="a table that `pyquant latency` wrote, to be shown beside the losses")
    add("--journal", metavar="FILE", help="keeps every evaluation; a killed run goes on with it")
    add("--out", metavar="DIR", help=f"folder for {_FILES}.json, .md, .csv, .png, .svg")


def run(args: argparse.Namespace) -> int:
    """Says the cost, measures, prints the table and the skip lists. -> 0. Raises ArgumentError, CheckpointError ..."""
    from torch import nn

    from pyquant.mixed_precision.choices.switchable import SwitchableModel
    from pyquant.mixed_precision.latency.measure import load_latency
    from pyquant.mixed_precision.loss.sensitivity import cost_of, sensitivity
    from pyquant.report.sensitivity import baselines_table, groups_table

    check_batches(args)
    if args.max_drop is not None:
        arguments.number("--max-drop", args.max_drop, 0, infinite=True)
    check_folder("--out", args.out)
    formats, mode = formats_of(args.formats), _MODES[args.mode]
    factory, data = model_factory(args.model), load_batches(args.data, "--data", args.model)()
    SCORERS.find(args.metric, "--metric")  # after the module of the model, which may register it
    eval_fn = None if args.eval is None else load_eval(args.eval, "--eval")
    if args.metric == "eval" and eval_fn is None:
        raise ArgumentError("--eval", "none", "a function of the model, for --metric eval")
    if args.by == "task" and eval_fn is None:
        raise ArgumentError("--by", "'task'", "'loss', or an --eval function")
    held_out = None if args.held_out is None else list(load_batches(args.held_out, "--held-out", args.model)())
    data, count = usual_batches(data, args.batches)
    if args.batches is not None:
        data = list(islice(data, count))
        if len(data) < count:
            raise ArgumentError("--batches", f"{count}", f"at most {len(data)}, the batches that the data has")
    model = factory()
    cost = cost_of(
        model,
        formats,
        args.metric,
        mode,
        with_eval=eval_fn is not None,
        num_batches=count,
        batches=None if held_out is None else len(held_out),
        grouping=args.grouping,
        repeats=args.repeats,
        loss=args.loss,
    )
    print(f"cost: {cost.line()}", flush=True)
    subject: nn.Module | SwitchableModel = model
    latency = None
    if args.latency is not None:
        subject = SwitchableModel(model, formats, data, num_batches=count, grouping=args.grouping)
        latency = load_latency(args.latency, subject)
    with ProgressBar("sensitivity", cost.evaluations) as shown:
        report = sensitivity(
            subject,
            data if subject is model else None,
            formats,
            args.metric,
            mode,
            eval_fn=eval_fn,
            higher_is_better=not args.lower_is_better,
            batches=held_out,
            num_batches=count,
            grouping=args.grouping,
            loss=args.loss,
            repeats=args.repeats,
            seed=args.seed,
            progress=lambda done, total, what: shown.step(what),
            journal=args.journal,
            latency=latency,
        )
    written: list[str] = []
    if args.out is not None:  # first: who reads the tables may stop
        paths, left_out = registry.write_possible(report, args.out, _FILES)
        written = [*(f"wrote {path}" for path in paths), *filter(None, [left_out])]
    if report.task is not None:
        print(baselines_table(report), end="\n\n")  # the float model's metric, which all others are compared with
    print(groups_table(report))
    if args.max_drop is not None:
        _print_skips(report, args.max_drop, args.by)
    for line in written:
        print(line)
    return 0


def _print_skips(report: SensitivityReport, max_drop: float, by: str) -> None:
    unit = (report.step_unit if report.mode == "cumulative" else report.unit) if by == "loss" else "metric"
    how = "measured" if report.mode == "cumulative" else "predicted"
    for format in report.formats[1:]:
        layers = report.skip_list(max_drop, format, by)
        print(f"skip for {format}, {how} drop of the rest <= {max_drop:g} ({unit}): {', '.join(layers) or 'nothing'}")
