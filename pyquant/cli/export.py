"""`pyquant export DIR FILE.onnx`: a saved model as an ONNX file, and what onnxruntime makes of every layer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from pyquant.cli.models import MODEL_HELP, load_inputs, model_factory

_EXAMPLES = """\
examples:
  pyquant export quantised model.onnx --model mypackage.models:build --inputs mypackage.models:example_inputs
  pyquant export quantised model.onnx --model mypackage.models:build --target tensorrt --report export.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a saved quantised model as an ONNX file (docs/onnx.md), opens onnxruntime's optimised graph of it, "
        "prints what each layer became and compares the results. Exit code 1 where onnxruntime multiplies an integer "
        "layer in floating point."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("directory", metavar="DIR", help="a folder that `pyquant quantize` or save_pretrained wrote")
    add("out", metavar="FILE", help="the ONNX file, FILE.onnx")
    add("--model", metavar="MODEL", required=True, help=f"the float model: {MODEL_HELP}")
    add(
        "--inputs",
        metavar="CALLABLE",
        help="package.module:callable that returns a tensor, tuple or dict; without it inputs are made for an "
        "nn.Sequential or a transformers model",
    )
    add(
        "--target",
        choices=("onnxruntime", "tensorrt"),
        default="onnxruntime",
        help="who runs it (default: %(default)s)",
    )
    add("--opset", type=int, default=21, help="21 to 23 (default: %(default)s)")
    add(
        "--dynamic-batch",
        action="store_true",
        help="the first dimension of every input may vary; all others, such as the number of tokens, are those of the "
        "inputs (docs/onnx.md: export(dynamic_shapes=) frees them)",
    )
    add("--input-names", nargs="+", metavar="NAME", help="of the file's inputs, in order (default: torch's)")
    add("--output-names", nargs="+", metavar="NAME", help="of the file's outputs, in order (default: torch's)")
    add("--report", metavar="FILE", help="save the report as JSON: `pyquant report` reads it")


def run(args: argparse.Namespace) -> int:
    """Writes the file and prints the report. -> 0, or 1 where an integer layer runs in floating point."""
    from pyquant.integrations.example import example_for
    from pyquant.integrations.onnx import export
    from pyquant.io.pretrained import load_pretrained
    from pyquant.report.onnx_export import layers_table, outputs_table
    from pyquant.report.records.record import save_record

    model = load_pretrained(args.directory, model_factory(args.model, "--model")).eval()
    for part in model.modules():  # a decoder inside of a model of transformers has a configuration of its own
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # it would give its cache too, which is no tensor
    given = load_inputs(args.inputs, "--inputs") if args.inputs else example_for(model)
    positional, named = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    positional = positional if isinstance(positional, tuple) else (positional,)
    report = export(
        model,
        positional,
        args.out,
        kwargs=named,
        target=args.target,
        dynamic_shapes=_first_dimensions(positional, named) if args.dynamic_batch else None,
        opset=args.opset,
        input_names=args.input_names,
        output_names=args.output_names,
    )
    if args.report:
        save_record(args.report, report)
    print(layers_table(report), outputs_table(report), sep="\n\n")
    print(f"\nwrote {args.out}")
    return 1 if args.target == "onnxruntime" and report.not_integer else 0


def _first_dimensions(positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    def free(x: Any) -> Any:
        return {0: torch.export.Dim.DYNAMIC} if isinstance(x, torch.Tensor) and x.dim() else None

    return pytree.tree_map(free, named or positional)
