"""`pyquant convert PATH OUT`: files of a model become a checkpoint of pyquant, never all of it in memory: quantised by
another tool, the same weights; in floating point, quantised layer by layer, or with data block by block."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from torch import nn

from pyquant.cli.calibrate import DATA_HELP
from pyquant.cli.models import MODEL_HELP, empty_model, load_batches, model_factory
from pyquant.cli.options import check_batches
from pyquant.cli.outputs import check_checkpoint
from pyquant.cli.progress import ProgressBar, Stages
from pyquant.cli.quantize import improvers_named, print_kinds, recipe_named, with_batches, with_options
from pyquant.core.presets import PRESETS, scheme_from_name
from pyquant.errors import ArgumentError
from pyquant.io.foreign import ACTIVATIONS_AS, open_foreign
from pyquant.io.foreign.source import Source
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.match import DEFAULT
from pyquant.recipe import Recipe

_PATH_HELP = "folder with config.json and safetensors files, or FILE.gguf"
_EXAMPLES = """\
examples:
  pyquant convert ./llama-w4a16 ./llama-pyquant
  pyquant convert ./llama-gptq ./llama-pyquant --activations int8
  pyquant convert ./mine ./mine-pyquant --model mypackage.models:build
  pyquant convert ./llama-bf16 ./llama-w4a16 --scheme "W4A16(group_size=128)"
  pyquant convert ./llama-bf16 ./llama-w8a8 --scheme W8A8 --data book.txt
  pyquant convert ./llama-bf16 ./llama-w4a8 --preset llm-w4a8 --data book.txt --cache /scratch
"""
_OF_DATA = ("batches", "improve", "cache")
_OF_FLOATS = ("skip", "embeddings", "heads", "on_indivisible", "device", "data", *_OF_DATA)
_OF_CODES = ("activations", "drop_kv_cache_scheme")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads a quantised checkpoint that another tool wrote (docs/checkpoints.md lists the formats) and saves it as "
        "one of pyquant, each weight to the bit. What cannot be taken exactly is refused with the reason. With "
        "--scheme PATH holds a model in floating point, which is quantised layer by layer: memory holds the quantised "
        "model and the floats of one layer. With --data it is quantised block by block into OUT, and memory holds one "
        "block: for static input ranges and for what improves. OUT.unfinished keeps finished blocks until all are "
        "there; the same command goes on after the last one."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("path", metavar="PATH", help=_PATH_HELP)
    add("out", metavar="OUT", help="where the checkpoint is saved")
    add("--model", metavar="MODEL", help=f"the model (default: the class that PATH/config.json names): {MODEL_HELP}")
    add("--activations", choices=ACTIVATIONS_AS, default=None, help="how layers take them (default: file)")
    add(
        "--drop-kv-cache-scheme",
        action="store_true",
        help="leave a key-value cache in floating point that is quantised",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--scheme", metavar="SCHEME", help="quantise a model in floating point: " + ", ".join(PRESETS))
    how.add_argument("--recipe", metavar="FILE", help="the same as a recipe says: YAML, TOML or JSON; with --data")
    how.add_argument("--preset", metavar="NAME", help="the same by a recommended recipe; with --data")
    add("--data", metavar="FN", help=f"with --scheme and the like: {DATA_HELP}")
    add("--batches", type=int, metavar="N", help="of the data (default: all; of a recipe: what it says)")
    add("--improve", nargs="+", default=[], metavar="NAME", help="with --data: improvers, as of `pyquant quantize`")
    add("--cache", metavar="DIR", help="with --data: inputs of blocks lie there, not in memory")
    add("--skip", nargs="+", default=[], metavar="PATTERN", help="with --scheme: layers to leave: name, glob, re:...")
    add("--embeddings", action="store_true", help="with --scheme: also Embedding layers, int8 with a scale a row")
    add("--heads", action="store_true", help="with --scheme: also output heads (lm_head), which stay float otherwise")
    add(
        "--on-indivisible",
        choices=CHOICES,
        default=None,
        help="with --scheme: layers whose rows the group size does not divide: as of `pyquant quantize`",
    )
    add("--device", metavar="DEVICE", help="with --scheme: where each layer is quantised, such as cuda (default: cpu)")


def run(args: argparse.Namespace) -> int:
    """Reads and saves. -> 0. Raises ArgumentError, CheckpointError, or what building the model raises."""
    import pyquant
    from pyquant.integrations.transformers import copy_companions

    check_batches(args)
    given = next((f"--{name}" for name in ("scheme", "recipe", "preset") if getattr(args, name)), None)
    for name in _OF_CODES if given else _OF_FLOATS:
        if getattr(args, name):
            got = f"given {'together with ' + given if given else 'without --scheme'}"
            allowed = "for checkpoints of codes" if given else "together with --scheme, for models in float"
            raise ArgumentError(f"--{name.replace('_', '-')}", got, allowed)
    if given and not args.data:
        for name in _OF_DATA:
            if getattr(args, name):
                raise ArgumentError(f"--{name}", "given without --data", "together with --data")
        if given != "--scheme":
            raise ArgumentError("--data", f"none, with {given}", f"{DATA_HELP}; --scheme takes none")
        if scheme_from_name(args.scheme).is_static:
            allowed = f"{DATA_HELP}: static input ranges are found with it; weight-only and dynamic schemes take none"
            raise ArgumentError("--data", f"none, with --scheme {args.scheme}", allowed)
    if not Path(args.path).exists():
        raise ArgumentError("PATH", f"{args.path}, no such file or folder", _PATH_HELP)
    if given and not Path(args.path).is_dir():
        raise ArgumentError("PATH", f"{args.path}, a file, with {given}", _PATH_HELP)
    check_checkpoint("OUT", args.out)
    if args.data:
        model, what = _of_data(args)
    else:
        model, what = _of_floats(args) if given else _of_codes(args)
        pyquant.save_pretrained(model.eval(), args.out)
    if Path(args.path).is_dir():
        copy_companions(args.path, args.out)
    print_kinds(model)
    print(f"{what} -> {args.out}; check it with: pyquant verify {shlex.quote(args.out)}")
    return 0


def _of_codes(args: argparse.Namespace) -> tuple[nn.Module, str]:
    import pyquant

    activations = args.activations or ACTIVATIONS_AS[0]
    options = {"activations": activations, "drop_kv_cache_scheme": args.drop_kv_cache_scheme}
    found = open_foreign(args.path, **options)  # before anything is built: what is wrong is told at once
    if Path(args.path).is_file() and not args.model:
        raise ArgumentError("--model", "none, for a GGUF file", f"{MODEL_HELP}: the file names no class")
    with ProgressBar("convert", 3) as shown:
        shown.step("building the model")
        model = model_factory(args.model, "--model")() if args.model else empty_model(Path(args.path), "PATH")
        shown.step(f"reading {len(found.layers)} layers")
        pyquant.load_quantized_(model, args.path, **options)
        shown.step("saving")
    return model, found.method


def _empty_of_floats(args: argparse.Namespace) -> nn.Module:
    import torch

    source = Source(Path(args.path), is_float=True)
    types = [source.span(name).dtype for name in source]
    dtype = next((one for one in types if one.is_floating_point), torch.float32)
    return model_factory(args.model, "--model")() if args.model else empty_model(Path(args.path), "PATH", dtype)


def _of_data(args: argparse.Namespace) -> tuple[nn.Module, str]:
    """The model, empty in its blocks: the files are written."""
    import pyquant

    data = load_batches(args.data, "--data", args.path, "PATH")
    improve = improvers_named(args.improve, data, "--improve")
    options: dict[str, object] = {"improve": improve, "device": args.device, "cache": args.cache}
    for name in ("skip", "embeddings", "heads", "on_indivisible", "batches") if args.recipe else ():
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ArgumentError(option, "given together with --recipe", "what the recipe says about layers")
    recipe = None
    if not args.scheme:
        recipe = Recipe.load(args.recipe) if args.recipe else with_options(recipe_named(args), args)
    model = _empty_of_floats(args)
    batches = data()
    if isinstance(batches, Iterator):
        batches = list(islice(batches, args.batches))
    config: object
    if recipe is None:
        config = {**dict.fromkeys(args.skip), DEFAULT: scheme_from_name(args.scheme)}
        options |= {"embeddings": args.embeddings, "heads": args.heads or None, "num_batches": args.batches}
        options |= {"on_indivisible": args.on_indivisible or CHOICES[0]}
    else:
        config = with_batches(recipe, batches, args)
    with Stages("convert") as shown:

        def show(done: int, total: int, what: str) -> None:
            shown(what.partition(" ")[0], done, total)

        try:
            pyquant.quantize_files(model, args.path, args.out, config, data=batches, progress=show, **options)  # type: ignore[arg-type]
        except ArgumentError as error:
            named = "--scheme" if args.scheme else "--recipe" if args.recipe else "--preset"
            named = "--skip" if any(f"{pattern!r}" in error.got for pattern in args.skip) else named
            asked = {"config": named, "improve": "--improve" if args.improve else named}
            asked |= {name: f"--{name}" for name in ("cache", "device")}
            if error.argument not in asked:
                raise
            raise ArgumentError(asked[error.argument], error.got, error.allowed) from None
    return model, args.scheme or args.recipe or args.preset


def _of_floats(args: argparse.Namespace) -> tuple[nn.Module, str]:
    import pyquant

    config = {**dict.fromkeys(args.skip), DEFAULT: scheme_from_name(args.scheme)}
    model = _empty_of_floats(args)
    with Stages("convert") as shown:
        try:
            pyquant.quantize_checkpoint_(
                model,
                args.path,
                config,
                embeddings=args.embeddings,
                heads=args.heads or None,
                on_indivisible=args.on_indivisible or CHOICES[0],
                device=args.device,
                progress=lambda done, total, name: shown("quantising", done, total),
            )
        except ArgumentError as error:
            if error.argument != "config":
                raise
            option = "--skip" if any(f"{pattern!r}" in error.got for pattern in args.skip) else "--scheme"
            raise ArgumentError(option, error.got, error.allowed) from None
    return model, args.scheme
