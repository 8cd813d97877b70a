"""`pyquant convert PATH OUT`: files of a model become a checkpoint of pyquant, never all of it in memory: quantised by
another tool, the same weights; in floating point, quantised layer by layer."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import nn

from pyquant.cli.models import MODEL_HELP, empty_model, model_factory
from pyquant.cli.progress import ProgressBar, Stages
from pyquant.cli.quantize import print_kinds
from pyquant.core.presets import PRESETS, scheme_from_name
from pyquant.errors import ArgumentError
from pyquant.io.foreign import ACTIVATIONS_AS, open_foreign
from pyquant.io.foreign.source import Source
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.match import DEFAULT

_EXAMPLES = """\
examples:
  pyquant convert ./llama-w4a16 ./llama-pyquant
  pyquant convert ./llama-gptq ./llama-pyquant --activations int8
  pyquant convert ./mine ./mine-pyquant --model mypackage.models:build
  pyquant convert ./llama-bf16 ./llama-w4a16 --scheme "W4A16(group_size=128)"
"""
_OF_FLOATS = ("skip", "embeddings", "heads", "on_indivisible", "device")
_OF_CODES = ("activations", "drop_kv_cache_scheme")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads a quantised checkpoint that another tool wrote (docs/checkpoints.md lists the formats) and saves it as "
        "one of pyquant, each weight to the bit. What cannot be taken exactly is refused with the reason. With "
        "--scheme PATH holds a model in floating point, which is quantised layer by layer: memory holds the quantised "
        "model and the floats of one layer. Schemes with static input ranges need data: `pyquant quantize`."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("path", metavar="PATH", help="folder with config.json and safetensors files, or FILE.gguf")
    add("out", metavar="OUT", help="where the checkpoint is saved")
    add("--model", metavar="MODEL", help=f"the model (default: the class that PATH/config.json names): {MODEL_HELP}")
    add("--activations", choices=ACTIVATIONS_AS, default=None, help="how layers take them (default: file)")
    add(
        "--drop-kv-cache-scheme",
        action="store_true",
        help="leave a key-value cache in floating point that is quantised",
    )
    add("--scheme", metavar="SCHEME", help="quantise a model in floating point: " + ", ".join(PRESETS))
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

    for name in _OF_CODES if args.scheme else _OF_FLOATS:
        if getattr(args, name):
            got = f"given {'together with' if args.scheme else 'without'} --scheme"
            allowed = "for checkpoints of codes" if args.scheme else "together with --scheme, for models in float"
            raise ArgumentError(f"--{name.replace('_', '-')}", got, allowed)
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise ArgumentError("OUT", f"{args.out}: a file", "a folder, new or existing")
    model, what = _of_floats(args) if args.scheme else _of_codes(args)
    pyquant.save_pretrained(model.eval(), args.out)
    if Path(args.path).is_dir():
        copy_companions(args.path, args.out)
    print_kinds(model)
    print(f"{what} -> {args.out}; check it with: pyquant verify {args.out}")
    return 0


def _of_codes(args: argparse.Namespace) -> tuple[nn.Module, str]:
    import pyquant

    activations = args.activations or ACTIVATIONS_AS[0]
    options = {"activations": activations, "drop_kv_cache_scheme": args.drop_kv_cache_scheme}
    found = open_foreign(args.path, **options)  # before anything is built: what is wrong is told at once
    with ProgressBar("convert", 3) as shown:
        shown.step("building the model")
        model = model_factory(args.model, "--model")() if args.model else empty_model(Path(args.path), "PATH")
        shown.step(f"reading {len(found.layers)} layers")
        pyquant.load_quantized_(model, args.path, **options)
        shown.step("saving")
    return model, found.method


def _of_floats(args: argparse.Namespace) -> tuple[nn.Module, str]:
    import torch

    import pyquant

    config = {**dict.fromkeys(args.skip), DEFAULT: scheme_from_name(args.scheme)}
    source = Source(Path(args.path), is_float=True)
    types = [source.span(name).dtype for name in source]
    dtype = next((one for one in types if one.is_floating_point), torch.float32)
    model = model_factory(args.model, "--model")() if args.model else empty_model(Path(args.path), "PATH", dtype)
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
