"""`pyquant search MODEL --data FN`: a format for every layer, measured on this machine, as a recipe file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from pyquant.cli.calibrate import DATA_HELP
from pyquant.cli.models import MODEL_HELP, load_batches, load_eval, model_factory
from pyquant.cli.options import add_formats, check_batches, formats_of
from pyquant.cli.outputs import check_file
from pyquant.cli.progress import Stages
from pyquant.core.names import did_you_mean
from pyquant.errors import ArgumentError
from pyquant.nn.match import FqnConfig
from pyquant.report.records.search import SearchReport
from pyquant.report.search import plan_table

_REPORTS = (".html", ".png", ".svg", ".csv", ".md", ".json")
_EVAL_HELP = (
    "package.module:callable that takes the model and returns its task metric; without it the share of predictions "
    "that stay the float model's counts"
)
_EXAMPLES = """\
examples:
  pyquant search mypackage.models:build --data mypackage.data:calibration --eval mypackage.data:accuracy
  pyquant search mypackage.models:build --data mypackage.data:calibration --max-drop 0.02 --report pareto.html
  pyquant search mypackage.models:build --data mypackage.data:calibration --objective size --formats float W8A8Dynamic
  pyquant quantize mypackage.models:build --recipe recipe.yaml --calibration calibration.json --out quantised
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures what every format costs and loses in every layer, searches the front of both, times the "
        "best candidates end to end, and writes the plan as a recipe."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("--data", required=True, metavar="FN", help=DATA_HELP)
    add("--score-data", metavar="FN", help="the same, for losses: held-out batches (default: --data)")
    add("--eval", metavar="FN", help=_EVAL_HELP)
    add("--lower-is-better", action="store_true", help="of the task metric")
    add(
        "--recipe",
        metavar="FILE",
        help="its `search` section gives defaults, its skip_modules are left, its training sections go into the plan",
    )
    add("--skip", nargs="+", default=[], metavar="PATTERN", help="layers to leave as floats: name, glob, re:...")
    add_formats(parser)
    add("--objective", default="latency", metavar="WHAT", help="latency, size or effective_bits; default: %(default)s")
    add(
        "--max-drop",
        type=float,
        metavar="X",
        help="of the task metric; default: the recipe's, else 0.01, with --eval or where no other limit is given",
    )
    add("--max-loss", type=float, metavar="X", help="of the label-free loss; then no task metric")
    add("--max-latency-us", type=float, metavar="X", help="of the whole model, by the table")
    add("--max-size-bytes", type=float, metavar="X", help="of the whole model")
    add("--max-effective-bits", type=float, metavar="X", help="bits a weight, on average, scales included")
    add(
        "--metric",
        help="label-free loss: kl (default); sqnr, mse, cosine with --eval, or with another limit than --max-drop",
    )
    add("--sensitivity", help="first tables by fisher, hessian ...; default: the metric")
    add("--algorithm", help="dp, exhaustive, greedy, bisection, nsga2; default: dp")
    add("--budget", type=int, default=40, help="configurations measured at most; default: 40")
    add("--corner-share", type=float, metavar="X", help="how far the front is looked at; default: to the limits")
    add("--batches", type=int, metavar="N", help="batches that calibrate; default: 16, or all of fewer")
    add("--grouping", default="auto", help="auto (q/k/v together) or none; default: %(default)s")
    add("--latency", metavar="FILE", help="a table that `pyquant latency` wrote; default: measured")
    add("--latency-seconds", type=float, default=60.0, metavar="S", help="default: 60")
    add("--clock", help="cpu, wall, cuda-graph; default: by device and threads")
    add("--threads", type=int, metavar="N", help="torch threads; default: as they are")
    add("--journal", metavar="FILE", help="goes on from what this file holds; default: none")
    add("--seed", type=int, default=0, help="default: 0")
    add("--out", default="recipe.yaml", metavar="FILE", help="the recipe; default: %(default)s")
    add("--calibration", default="calibration.json", metavar="FILE", help="default: %(default)s")
    add("--record", metavar="FILE", help="everything that was measured, as JSON for `pyquant report`")
    add("--report", nargs="+", metavar="FILE", default=[], help=".html .png .svg .csv .md .json")


def run(args: argparse.Namespace) -> int:
    """Searches and writes. -> 0. Raises ArgumentError, UnsupportedError, or what building the model raises."""
    import pyquant
    from pyquant.measure.timing import using_threads
    from pyquant.ptq.ranges_file import save_ranges
    from pyquant.recipe import Recipe, SearchParams

    check_batches(args)
    factory, data = model_factory(args.model), load_batches(args.data, "--data", args.model)
    score = load_batches(args.score_data, "--score-data", args.model) if args.score_data else None
    eval_fn = load_eval(args.eval, "--eval") if args.eval else None
    base = Recipe.load(args.recipe) if args.recipe else Recipe()
    asked = base.search or SearchParams()
    limits = (args.max_loss, args.max_latency_us, args.max_size_bytes, args.max_effective_bits)
    max_drop = args.max_drop
    if max_drop is None and (eval_fn is not None or all(limit is None for limit in limits)):
        max_drop = asked.max_drop
    check_file("--out", args.out, (".yaml", ".yml", ".toml", ".json"))
    check_file("--calibration", args.calibration, (".json",))
    check_file("--record", args.record, _REPORTS)
    for path in args.report:
        check_file("--report", path, _REPORTS)
    model, known = factory(), base.selective_quantizer_params.skip_modules or ()
    chosen = _filter_of(model, {**dict.fromkeys(args.skip, "--skip"), **dict.fromkeys(known, "--recipe")})
    with Stages("search") as shown, using_threads(args.threads):
        plan = pyquant.search(
            model,
            None,
            data(),
            formats_of(args.formats or asked.formats),
            eval_fn,
            max_drop,
            args.objective,
            higher_is_better=not args.lower_is_better,
            metric=args.metric or asked.metric,
            sensitivity=args.sensitivity or asked.sensitivity,
            algorithm=args.algorithm or asked.algorithm,
            never_slower_margin=asked.never_slower_margin,
            budget=args.budget,
            corner_share=args.corner_share,
            num_batches=args.batches,
            grouping=args.grouping,
            filter_fn=chosen,
            score_data=None if score is None else score(),
            max_loss=args.max_loss,
            max_latency_us=args.max_latency_us,
            max_size_bytes=args.max_size_bytes,
            max_effective_bits=args.max_effective_bits,
            latency=args.latency,
            latency_seconds=args.latency_seconds,
            journal=args.journal,
            seed=args.seed,
            clock=args.clock,
            progress=shown,
        )
    plan = replace(plan, recipe=replace(plan.recipe, qat=base.qat, callback=base.callback, ptq_only=base.ptq_only))
    # Written first: who reads the table may stop. Without static layers a file without ranges: the next command names
    # it whatever the plan is.
    written = [plan.save(args.out), save_ranges(args.calibration, plan.ranges, plan.recipe)]
    if args.record:
        written.append(plan.report(args.record))
    written += [plan.report(path) for path in args.report]
    print("\n".join(summary(plan.record)))
    print("wrote " + ", ".join(map(str, written)))
    if not any(plan.schemes.values()):
        print("the plan leaves every layer in floating point: there is nothing to quantise")
    else:
        words = ["pyquant", "quantize", args.model, "--recipe", args.out, "--calibration", args.calibration]
        print(f"next: {shlex.join([*words, '--out', 'quantised'])}")
    return 0


def _filter_of(model: nn.Module, patterns: Mapping[str, str]) -> Callable[[nn.Module, str], bool] | None:
    """filter_fn that leaves what {pattern: the option that it came by} match, and all inside of it; None for none.
    Raises ArgumentError for a pattern that matches nothing."""
    if not patterns:
        return None
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    left: set[str] = set()
    for pattern, option in patterns.items():
        rule = FqnConfig({pattern: None}).of_model(model)
        found = {name for name, module in modules if rule.decide(name, module) is not None}
        if not found:
            hint = did_you_mean(pattern, [name for name, _ in modules])
            allowed = "names of layers, globs or 're:...'"
            raise ArgumentError(option, f"{pattern!r}, which matches nothing{hint}", allowed)
        left |= found
    return lambda module, name: not any(name == one or name.startswith(f"{one}.") for one in left)


def summary(record: SearchReport) -> list[str]:
    """A plan for people: formats of all groups, then the verdict."""
    counts = ", ".join(f"{count} {what}" for what, count in sorted(record.counts.items()))
    return [plan_table(record), "", record.verdict, counts, *record.notes]
