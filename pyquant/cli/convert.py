"""`pyquant convert PATH OUT`: a quantised checkpoint of another tool becomes one of pyquant, the same weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyquant.cli.models import MODEL_HELP, empty_model, model_factory
from pyquant.cli.progress import ProgressBar
from pyquant.cli.quantize import print_kinds
from pyquant.errors import ArgumentError
from pyquant.io.foreign import ACTIVATIONS_AS, open_foreign

_EXAMPLES = """\
examples:
  pyquant convert ./llama-w4a16 ./llama-pyquant
  pyquant convert ./llama-gptq ./llama-pyquant --activations int8
  pyquant convert ./mine ./mine-pyquant --model mypackage.models:build
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads a quantised checkpoint that another tool wrote (docs/checkpoints.md lists the formats) and saves it as "
        "one of pyquant, each weight to the bit. What cannot be taken exactly is refused with the reason."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("path", metavar="PATH", help="folder with config.json and safetensors files, or FILE.gguf")
    add("out", metavar="OUT", help="where the checkpoint is saved")
    add("--model", metavar="MODEL", help=f"the model (default: the class that PATH/config.json names): {MODEL_HELP}")
    add("--activations", choices=ACTIVATIONS_AS, default=ACTIVATIONS_AS[0], help="how layers take them (default: file)")
    add(
        "--drop-kv-cache-scheme",
        action="store_true",
        help="leave a key-value cache in floating point that is quantised",
    )


def run(args: argparse.Namespace) -> int:
    """Reads and saves. -> 0. Raises ArgumentError, CheckpointError, or what building the model raises."""
    import pyquant
    from pyquant.integrations.transformers import copy_companions

    options = {"activations": args.activations, "drop_kv_cache_scheme": args.drop_kv_cache_scheme}
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise ArgumentError("OUT", f"{args.out}: a file", "a folder, new or existing")
    found = open_foreign(args.path, **options)  # before anything is built: what is wrong is told at once
    with ProgressBar("convert", 3) as shown:
        shown.step("building the model")
        model = model_factory(args.model, "--model")() if args.model else empty_model(Path(args.path), "PATH")
        shown.step(f"reading {len(found.layers)} layers")
        pyquant.load_quantized_(model, args.path, **options)
        shown.step("saving")
        pyquant.save_pretrained(model.eval(), args.out)
        if Path(args.path).is_dir():
            copy_companions(args.path, args.out)
    print_kinds(model)
    print(f"{found.method} -> {args.out}; check it with: pyquant verify {args.out}")
    return 0
