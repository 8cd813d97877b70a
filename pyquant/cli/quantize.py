"""`pyquant quantize MODEL --scheme S --out DIR`: build a model, quantise it, save it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch import nn

from pyquant.cli.config import QuantizeConfig, read_config
from pyquant.cli.models import MODEL_HELP, model_factory
from pyquant.cli.progress import Progress
from pyquant.core.presets import PRESETS, scheme_from_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.report.render import table

_EXAMPLES = """\
examples:
  pyquant quantize mypackage.models:build --scheme W8A8Dynamic --out quantised
  pyquant quantize mypackage.models:build --scheme "W4A8Dynamic(group_size=64)" --skip "*.head" --out quantised
  pyquant quantize ./hugging-face-folder --scheme W8A8Dynamic --embeddings --out quantised
  pyquant quantize mypackage.models:build --config quantise.yaml --out quantised

a configuration file:
  default: W8A8Dynamic
  embeddings: true
  layers:
    "encoder.*.dense": W4A8Dynamic(group_size=64)
    "re:.*classifier": null
"""


def add_parser(commands: Any) -> None:
    """Adds `quantize` to the command line."""
    parser = commands.add_parser(
        "quantize",
        help="quantise a model and save it",
        description="Builds a model, replaces its Linear layers by quantised ones, and saves it with a manifest of "
        "digests. Schemes that need calibration data (W8A8, W4A8, W4A4) are for the Python interface.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--scheme", metavar="SCHEME", help="for every Linear: " + ", ".join(PRESETS))
    how.add_argument("--config", metavar="FILE", help="YAML or JSON: schemes by layer name or pattern")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="PATTERN", help="layers to leave alone: name, glob, re:..."
    )
    parser.add_argument("--embeddings", action="store_true", help="also Embedding layers, int8 with a scale a row")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the quantised model is saved")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantises and saves. -> 0. Raises ArgumentError, or what building the model raises."""
    import pyquant

    config = _config(args)
    factory = model_factory(args.model)
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise ArgumentError("--out", f"{args.out}: a file", "a folder, new or existing")
    with Progress("quantize", 3) as shown:
        shown.step("building the model")
        model = factory()
        before = _state_bytes(model)
        shown.step("quantising")
        model = pyquant.quantize_(model, config.schemes, embeddings=config.embeddings)
        shown.step("saving")
        pyquant.save_pretrained(model, args.out)
    _print_summary(model, before, args.out)
    return 0


def _config(args: argparse.Namespace) -> QuantizeConfig:
    if args.config:
        found = read_config(args.config)
    else:
        found = QuantizeConfig({"_default": scheme_from_name(args.scheme)})
    skipped: dict[str | type, QScheme | None] = dict.fromkeys(args.skip)
    return QuantizeConfig({**skipped, **found.schemes}, found.embeddings or args.embeddings)


def _print_summary(model: nn.Module, before: int, out: str) -> None:
    counts: dict[str, int] = {}
    for module in model.modules():
        name = _kind(module)
        if name:
            counts[name] = counts.get(name, 0) + 1
    after = _state_bytes(model)
    print(table(["layers", "count"], sorted(counts.items())))
    print(f"state: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB ({before / max(after, 1):.2f}x smaller)")
    print(f"saved in {out}; check it with: pyquant verify {out}")


def _kind(module: nn.Module) -> str | None:
    from pyquant.nn.qembedding import QEmbedding
    from pyquant.nn.qlinear import QLinear

    if isinstance(module, QLinear):
        return str(module.scheme)
    if isinstance(module, QEmbedding):
        return "embedding, int8 rows"
    return "float Linear" if isinstance(module, nn.Linear) else None


def _state_bytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in model.state_dict().values() if hasattr(t, "nbytes"))
