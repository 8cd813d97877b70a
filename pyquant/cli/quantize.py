"""`pyquant quantize MODEL --scheme S --out DIR`: build a model, quantise it (with data, by a recipe), save it."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from pyquant.cli.calibrate import DATA_HELP
from pyquant.cli.models import MODEL_HELP, load_batches, model_factory
from pyquant.cli.options import check_batches
from pyquant.cli.outputs import check_checkpoint
from pyquant.cli.progress import ProgressBar
from pyquant.core.presets import PRESETS, scheme_from_name
from pyquant.errors import ArgumentError
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.match import DEFAULT
from pyquant.ptq.improve.steps import NAMES as IMPROVERS
from pyquant.recipe import LayerRule, Recipe
from pyquant.recipe.layer_rule import FLOAT
from pyquant.recipe.recommended import NAMES as RECOMMENDED
from pyquant.recipe.recommended import recommended
from pyquant.report.render import table

_EXAMPLES = """\
examples:
  pyquant quantize mypackage.models:build --scheme W8A8Dynamic --out quantised
  pyquant quantize mypackage.models:build --scheme "W4A8Dynamic(group_size=64)" --skip "*.head" --out quantised
  pyquant quantize ./hugging-face-folder --scheme W8A8Dynamic --embeddings --out quantised
  pyquant quantize mypackage.models:build --config quantise.yaml --out quantised
  pyquant quantize mypackage.models:build --scheme W8A8Dynamic --auto --data mypackage.data:batches --out quantised
  pyquant quantize mypackage.models:build --scheme W8A8 --data mypackage.data:batches --improve smooth --out q
  pyquant quantize mypackage.models:build --recipe recipe.yaml --data mypackage.data:calibration --out quantised
  pyquant quantize ./hugging-face-folder --preset llm-w4a8 --data book.txt --out quantised
  pyquant quantize mypackage.models:build --recipe recipe.yaml --calibration calibration.json --out quantised

a configuration file:
  default: W8A8Dynamic
  embeddings: true
  layers:
    "encoder.*.dense": W4A8Dynamic(group_size=64)
    "re:.*classifier": null
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Builds a model, replaces its Linear and Conv2d layers by quantised ones, and saves it with a "
        "manifest of digests. Schemes with static input ranges (W8A8, W4A8, W4A8TwoLevel, W4A4) need --data, or "
        "--calibration; what improves (gptq, ...), as half of the presets do, needs --data."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--scheme", metavar="SCHEME", help="for every Linear and Conv2d: " + ", ".join(PRESETS))
    how.add_argument("--recipe", metavar="FILE", help="YAML, TOML or JSON: schemes, calibrators, what is skipped")
    how.add_argument("--preset", metavar="NAME", help="a recommended recipe: " + ", ".join(RECOMMENDED))
    how.add_argument("--config", metavar="FILE", help="the same, where what is not said is as without a recipe")
    ranges = parser.add_mutually_exclusive_group()
    ranges.add_argument("--data", metavar="FN", help=f"to calibrate static inputs with: {DATA_HELP}")
    ranges.add_argument("--calibration", metavar="FILE", help="with --recipe: ranges that `pyquant calibrate` wrote")
    add("--batches", type=int, metavar="N", help="of the data (default: all; of a recipe: what it says)")
    add("--improve", nargs="+", default=[], metavar="NAME", help=f"with --data: {', '.join(IMPROVERS)}")
    add("--skip", nargs="+", default=[], metavar="PATTERN", help="layers to leave alone: name, glob, re:...")
    add("--embeddings", action="store_true", help="also Embedding layers, int8 with a scale a row")
    add("--heads", action="store_true", help="also output heads (lm_head), which stay float otherwise")
    add(
        "--on-indivisible",
        choices=CHOICES,
        default=None,
        help="layers whose rows the group size does not divide: one scale a channel (default), left, or an error",
    )
    add(
        "--auto",
        action="store_true",
        help="leave in floating point what integers would make slower here: timed with the first batch of --data",
    )
    add("--out", required=True, metavar="DIR", help="where the quantised model is saved")


def run(args: argparse.Namespace) -> int:
    """Quantises and saves. -> 0. Raises ArgumentError, or what building the model raises."""
    import pyquant
    from pyquant.integrations.transformers import copy_companions

    check_batches(args)
    factory = model_factory(args.model)
    quantise = _quantiser(args)  # last: a recipe may name what the modules of model and data register
    check_checkpoint("--out", args.out)
    with ProgressBar("quantize", 3) as shown:
        shown.step("building the model")
        model = factory()
        before = _state_bytes(model)
        shown.step("quantising")
        model, recipe = quantise(model)
        shown.step("saving")
        pyquant.save_pretrained(model, args.out, recipe=recipe)
        if Path(args.model).is_dir():
            copy_companions(args.model, args.out)
    _print_summary(model, before, args.out)
    return 0


def _quantiser(args: argparse.Namespace) -> Callable[[nn.Module], tuple[nn.Module, Recipe | None]]:
    """What is to be done to the model, giving the recipe too that it was done by, if there is one; all that can be
    wrong in the arguments is found here, before it is built."""
    data = load_batches(args.data, "--data", args.model) if args.data else None
    if args.auto and data is None:
        raise ArgumentError("--auto", "given without --data", "together with --data, whose first batch is the example")
    improve = improvers_named(args.improve, data, "--improve")
    given_recipe = args.recipe or args.config or args.preset
    if args.calibration and not args.recipe:
        raise ArgumentError("--calibration", args.calibration, "together with --recipe")
    for name in ("skip", "embeddings", "heads", "on_indivisible", "batches") if args.recipe else ():
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ArgumentError(option, "given together with --recipe", "what the recipe says about layers")
    if not given_recipe:
        config = {**dict.fromkeys(args.skip), DEFAULT: scheme_from_name(args.scheme)}
        options = {"embeddings": args.embeddings, "heads": args.heads or None, "num_batches": args.batches}
        options |= {"on_indivisible": args.on_indivisible or CHOICES[0], "improve": improve}
    else:
        recipe = Recipe.load(args.recipe) if args.recipe else with_options(recipe_named(args), args)
        is_float = recipe.default_scheme() is None and not any(recipe.rules().values())
        if is_float and not recipe.embeddings:
            got = f"{args.recipe or args.config or args.preset}, which leaves every layer in floating point"
            raise ArgumentError("--recipe", got, "a scheme for at least one layer: this model is used as it is")
        given_by = next(f"--{name}" for name in ("recipe", "config", "preset") if getattr(args, name))
        improvers_named(improve or recipe.improve, data, "--improve" if improve else given_by)
        ranges = _ranges(args, recipe) if args.calibration else None

    def quantise(model: nn.Module) -> tuple[nn.Module, Recipe | None]:
        from pyquant.ptq import quantize_recipe_
        from pyquant.ptq.auto import auto_
        from pyquant.ptq.quantize import quantize_

        batches = _batches(data, args, bool(improve or (given_recipe and recipe.improve)))
        try:
            if not given_recipe and args.auto:
                print(auto_(model, _example(model, batches), config, data=batches, **options))
                return model, None
            if not given_recipe:
                return quantize_(model, config, data=batches, **options), None
            counted = with_batches(recipe, batches, args)
            speed: dict[str, Any] = {"check_speed": False} if args.auto else {}
            quantize_recipe_(model, counted, batches, ranges=ranges, improve=improve, **speed)
            if args.auto:
                print(auto_(model, _example(model, batches)))
            return model, counted
        except ArgumentError as error:
            if args.recipe or error.argument not in ("config", "recipe.layers"):
                raise
            named = "--config" if args.config else "--preset" if args.preset else "--scheme"
            option = "--skip" if any(f"{pattern!r}" in error.got for pattern in args.skip) else named
            raise ArgumentError(option, error.got, error.allowed) from None

    return quantise


def improvers_named(names: Iterable[str], data: object, asked_by: str) -> tuple[str, ...]:
    """check_names, whose errors speak of the options."""
    from pyquant.ptq.improve.steps import check_names

    names = tuple(names)
    try:
        return check_names(names, data)
    except ArgumentError as error:
        if error.argument != "data":
            raise ArgumentError(asked_by, error.got, error.allowed) from None
        raise ArgumentError("--data", f"none, and {asked_by} asks for {', '.join(names)}", DATA_HELP) from None


def recipe_named(args: argparse.Namespace) -> Recipe:
    """What --config or --preset names."""
    if not args.preset:
        return Recipe.load_config(args.config)
    try:
        return recommended(args.preset)
    except ArgumentError as error:
        raise ArgumentError("--preset", error.got, error.allowed) from None


def with_options(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """The recipe with --skip, --embeddings, --heads and --on-indivisible."""
    known = recipe.selective_quantizer_params.skip_modules or ()
    skipped = {pattern: LayerRule(FLOAT) for pattern in args.skip if pattern not in known}
    return replace(
        recipe,
        layers={**skipped, **{key: rule for key, rule in recipe.layers.items() if key not in skipped}},
        embeddings=recipe.embeddings or args.embeddings,
        heads=True if args.heads else recipe.heads,
        on_indivisible=args.on_indivisible or recipe.on_indivisible,
    )


def with_batches(recipe: Recipe, batches: Iterable[Any] | None, args: argparse.Namespace) -> Recipe:
    """The recipe with the number of batches: of a recipe what it says, otherwise --batches, or all there are."""
    from pyquant.ptq.quantize import count_of

    if args.recipe or batches is None:
        return recipe
    count = count_of(batches, args.batches)
    return replace(recipe, calib_params=replace(recipe.calib_params, num_calib_batches=count))


def _ranges(args: argparse.Namespace, recipe: Recipe) -> Any:
    from pyquant.ptq.ranges_file import load_ranges

    ranges, calibrated_with = load_ranges(args.calibration)
    if calibrated_with != recipe:
        got = f"{args.calibration}, made with another recipe than {args.recipe}"
        raise ArgumentError("--calibration", got, "the ranges of this recipe: run pyquant calibrate again")
    return ranges


def _batches(
    data: Callable[[], Iterable[Any]] | None, args: argparse.Namespace, improves: bool
) -> Iterable[Any] | None:
    batches = None if data is None else data()
    # improvers, and the comparison of speeds after all else, go through the data more than once
    if isinstance(batches, Iterator) and (improves or args.auto):
        return list(islice(batches, args.batches))
    if batches is not None and args.batches is None and not args.recipe and not _has_length(batches):
        return list(batches)  # all of them, as nobody knows how many they are
    return batches


def _has_length(batches: Iterable[Any]) -> bool:
    try:
        len(batches)  # type: ignore[arg-type]
    except TypeError:  # a loader over an iterable data set raises it, too
        return False
    return True


def _example(model: nn.Module, batches: Iterable[Any] | None) -> Any:
    """The first batch, as the model takes it."""
    from pyquant.calibrate.run import inputs_of

    for batch in batches or ():
        args, keywords, _ = inputs_of(model, None)(batch)
        return keywords or tuple(args)
    raise ArgumentError("--data", "no batch", "at least one batch, the example of --auto")


def _print_summary(model: nn.Module, before: int, out: str) -> None:
    after = _state_bytes(model)
    print_kinds(model)
    print(f"state: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB ({before / max(after, 1):.2f}x smaller)")
    print(f"saved in {out}; check it with: pyquant verify {shlex.quote(out)}")


def print_kinds(model: nn.Module) -> None:
    """How many layers of each scheme there are, and how many that stayed in floating point."""
    counts = Counter(name for module in model.modules() if (name := _kind(module)) is not None)
    print(table(["layers", "count"], sorted(counts.items())))


def _kind(module: nn.Module) -> str | None:
    from pyquant.nn.linear_call import LinearCall
    from pyquant.nn.qconv import QConv2d
    from pyquant.nn.qembedding import QEmbedding

    if isinstance(module, LinearCall):
        return f"convolution, {module.scheme}" if isinstance(module, QConv2d) else str(module.scheme)
    if isinstance(module, QEmbedding):
        return "embedding, int8 rows"
    return f"float {type(module).__name__}" if isinstance(module, (nn.Linear, nn.Conv2d)) else None


def _state_bytes(model: nn.Module) -> int:
    """Of the tensors of a state, those in the same memory (tied weights) once."""
    tensors = [t for t in model.state_dict().values() if hasattr(t, "nbytes")]
    return sum({(t.data_ptr() or id(t), t.nbytes): t.nbytes for t in tensors}.values())
