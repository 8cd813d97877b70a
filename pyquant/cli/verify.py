"""`pyquant verify DIR`: integrity of every byte, bits of every layer against the specification, error against float."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.cli.models import load_inputs, model_factory
from pyquant.cli.progress import ProgressBar
from pyquant.errors import ArgumentError
from pyquant.float_matrices import FloatMatrix, trace_floats
from pyquant.io.checkpoint import Checkpoint, load_checkpoint
from pyquant.io.pretrained import layer_of, load_pretrained
from pyquant.io.pretrained.before import linear_behind
from pyquant.io.record import LayerRecord
from pyquant.nn.flow import call, first_tensor
from pyquant.nn.forms import expose_linears_
from pyquant.nn.linear_call import unpacked
from pyquant.nn.matrices import is_matrix
from pyquant.nn.products import MULTIPLIED
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear
from pyquant.report.render import table

_ROWS = (1, 5)  # batch sizes that each layer is tried with


@dataclass(frozen=True)
class LayerVerdict:
    """One layer. exact: its output has the specification's bits; None where the scheme does not promise that.

    sqnr_db, cosine, max_error   of its output against the float layer's on Gaussian inputs; None without --against.
    """

    name: str
    scheme: str
    exact: bool | None
    sqnr_db: float | None = None
    cosine: float | None = None
    max_error: float | None = None

    def cells(self) -> list[str]:
        """A row of the table."""
        bits = {True: "equal", False: "DIFFER", None: "not promised"}[self.exact]
        errors = ((self.sqnr_db, ".1f"), (self.cosine, ".6f"), (self.max_error, ".3g"))
        return [self.name, self.scheme, bits, *("-" if v is None else format(v, form) for v, form in errors)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks every byte against the manifest's digests and every layer's output bits, as the native "
        "kernels give them, against the executable specification. With --against also reports each layer's error to "
        "the float model's layer, runs the loaded model once and names what it multiplies by in floating point; with "
        "--inputs the error of the whole model's output. Exit code 1 when a byte or a bit is wrong."
    )
    parser.epilog = (
        "examples:\n  pyquant verify quantised\n  pyquant verify quantised --against mypackage.models:build\n"
        "  pyquant verify quantised --against mypackage.models:build --inputs mypackage.models:example_inputs"
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="a folder that `pyquant quantize` or save_pretrained wrote")
    add("--against", metavar="MODEL", help="the float model: package.module:callable or a Hugging Face folder")
    add(
        "--inputs",
        metavar="CALLABLE",
        help="package.module:callable that returns a tensor, tuple or dict; without it inputs are made for an "
        "nn.Sequential or a transformers model",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the verdict. -> 0, or 1 when a layer's bits are wrong. Raises CheckpointError for damaged files."""
    if args.inputs and not args.against:
        raise ArgumentError(
            "--inputs", args.inputs, "--against as well: it builds the model that the inputs run through"
        )
    checkpoint = load_checkpoint(args.directory)
    factory = model_factory(args.against, "--against") if args.against else None
    float_model = expose_linears_(factory()) if factory else None
    layers = [record for record in checkpoint.layers if record.kind != "embedding"]
    verdicts = []
    with ProgressBar("verify", max(len(layers), 1)) as shown:
        for record in layers:
            shown.step(record.name)
            verdicts.append(verify_layer(record, _float_layer(float_model, record, checkpoint)))
    whole, traced, why_not = None, None, "pass --against MODEL to check them."
    if factory:
        given = load_inputs(args.inputs, "--inputs") if args.inputs else None
        quantised = load_pretrained(args.directory, factory).eval()
        if args.inputs:
            whole = _whole_model(quantised, factory, given)
        try:
            traced, why_not = trace_floats(quantised, given), ""
        except ArgumentError as error:
            if args.inputs:
                raise
            why_not = f"--inputs: {error.got}"
    wrong = [v.name for v in verdicts if v.exact is False]
    floats, others = float_matrices(checkpoint), None if float_model is None else other_tensors(checkpoint, float_model)
    digest, count = checkpoint.manifest_sha256, len(checkpoint.layers)
    _print(args, verdicts, whole, digest, count, wrong, floats, others, traced, why_not)
    return 1 if wrong else 0


def other_tensors(checkpoint: Checkpoint, float_model: nn.Module) -> list[str]:
    """Names of tensors in floating point whose numbers are not those of the float model, in the checkpoint's type."""
    state = float_model.state_dict()
    return sorted(
        name
        for name, tensor in checkpoint.tensors.items()
        if name in state and tensor.is_floating_point() and not torch.equal(tensor, state[name].to(tensor.dtype))
    )


def float_matrices(checkpoint: Checkpoint) -> dict[str, float]:
    """{tensor name: share} of the matrices that a checkpoint holds in floating point, the largest first.

    share  of the elements of all matrices, quantised ones included, 0 to 1.
    """
    sizes = {name: tensor.numel() for name, tensor in checkpoint.tensors.items() if is_matrix(tensor)}
    quantised = sum(record.in_features * record.out_features for record in checkpoint.layers)
    total = (sum(sizes.values()) + quantised) or 1
    return {name: size / total for name, size in sorted(sizes.items(), key=lambda item: -item[1])}


def verify_layer(record: LayerRecord, float_layer: nn.Linear | nn.Conv2d | None) -> LayerVerdict:
    """The verdict on one layer, with Gaussian inputs of a fixed seed."""
    layer = layer_of(record)
    generator = torch.Generator().manual_seed(0)
    exact: bool | None = None
    errors: dict[str, float] = {}
    with torch.inference_mode():
        for rows in _ROWS:
            x = _inputs(layer, rows, generator)
            y = _data(layer(x))
            if layer.scheme.is_integer:
                exact = torch.equal(y, _data(layer.reference(x))) and exact is not False
            if float_layer is not None and layer.scheme.outputs is None and record.activation == "none":
                errors = compare(y, float_layer.float()(x))
    return LayerVerdict(record.name, str(layer.scheme), exact, **errors)


def _inputs(layer: QLinear | QConv2d, rows: int, generator: torch.Generator) -> Tensor:
    """Gaussian rows, or for a convolution as many (at most four) images a little larger than its kernel.

    Of a static layer they lie in the range that it was calibrated for, which is six standard deviations wide.
    """
    if isinstance(layer, QLinear):
        x = torch.randn(rows, layer.in_features, generator=generator, dtype=torch.float32, device="cpu")
    else:
        sizes = zip(layer.patches.dilation, layer.patches.kernel_size, strict=True)
        height, width = (d * (k - 1) + 4 for d, k in sizes)
        x = torch.randn(
            min(rows, 4), layer.in_channels, height, width, generator=generator, dtype=torch.float32, device="cpu"
        )
    inputs, scale = layer.scheme.inputs, layer.input_scale_
    if inputs is None or scale is None:
        return x
    low, high = inputs.code_range
    zero = 0 if layer.input_zero_point_ is None else layer.input_zero_point_.item()
    return scale.item() * ((high - low) / 6 * x.clamp(-3, 3) + (high + low) / 2 - zero)


def compare(y: Tensor, reference: Tensor) -> dict[str, float]:
    """{'sqnr_db', 'cosine', 'max_error'} of y against a reference of the same shape, in float64."""
    a, b = y.double().flatten(), reference.double().flatten()
    noise, signal = float((a - b).square().sum()), float(b.square().sum())
    sqnr = math.inf if noise == 0 else (10 * math.log10(signal / noise) if signal > 0 else -math.inf)
    cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0)) if len(a) else 1.0
    return {"sqnr_db": sqnr, "cosine": cosine, "max_error": float((a - b).abs().max()) if len(a) else 0.0}


def _float_layer(model: nn.Module | None, record: LayerRecord, checkpoint: Checkpoint) -> nn.Linear | nn.Conv2d | None:
    """The float model's layer of that name, or what it is behind a step that the saved model has and it has not.
    Raises ArgumentError where it is another layer than the one that was quantised."""
    if model is None:
        return None
    name = record.name
    modules = dict(model.named_modules(remove_duplicate=False))
    module, outer = modules.get(name), name.removesuffix(".linear")
    whole = modules.get(outer)
    if module is None and isinstance(whole, nn.Linear):
        module = linear_behind(checkpoint, outer, whole.float())
    if module is None:
        raise ArgumentError("--against", f"a model without a layer {name!r}", "the model that was quantised")
    if not isinstance(module, (nn.Linear, nn.Conv2d)):
        raise ArgumentError("--against", f"{name!r} is a {type(module).__name__}", "a torch.nn.Linear or Conv2d there")
    kind, there = "Conv2d" if record.kind == "conv2d" else "Linear", module.weight.flatten(1).shape
    if isinstance(module, nn.Conv2d) != (kind == "Conv2d") or there != (record.out_features, record.in_features):
        got = f"{name!r} is a {type(module).__name__} with weights {list(module.weight.shape)}"
        words = f"a {kind} of {record.in_features} weights for each of {record.out_features} outputs"
        raise ArgumentError("--against", got, f"the model that was quantised, which has {words} there")
    return module


def _whole_model(quantised: nn.Module, factory: Callable[[], nn.Module], given: Any) -> dict[str, float]:
    with torch.inference_mode():
        y, reference = (first_tensor(call(model, given)) for model in (quantised, factory()))
    if y is None or reference is None:
        raise ArgumentError("--inputs", "a model that returned no tensor", "a model that returns tensors")
    return compare(y, reference)


def _data(y: Any) -> Tensor:
    data: Tensor = y if isinstance(y, Tensor) else unpacked(y).data
    return data


def _print(
    args: argparse.Namespace,
    verdicts: list[LayerVerdict],
    whole: dict[str, float] | None,
    digest: str,
    count: int,
    wrong: list[str],
    floats: dict[str, float],
    others: list[str] | None,
    traced: list[FloatMatrix] | None,
    why_not: str,
) -> None:
    if args.json:
        layers = [
            {k: (str(v) if v in (math.inf, -math.inf) else v) for k, v in asdict(item).items()} for item in verdicts
        ]
        report = {"ok": not wrong, "manifest_sha256": digest, "layers": layers, "model": whole, "float": floats}
        report["other_tensors"] = others
        report["run"] = None if traced is None else [asdict(one) for one in traced]
        print(json.dumps(report, indent=1))
        return
    print(table(["layer", "scheme", "bits", "SQNR dB", "cosine", "max error"], [v.cells() for v in verdicts]))
    if whole:
        cells = f"cosine {whole['cosine']:.6f}, max error {whole['max_error']:.3g}"
        print(f"whole model: SQNR {whole['sqnr_db']:.1f} dB, {cells}")
    if floats:
        shown = ", ".join(f"{name} ({share:.1%})" for name, share in list(floats.items())[:5])
        more = f" and {len(floats) - 5} more" if len(floats) > 5 else ""
        print(f"floating point: {sum(floats.values()):.1%} of the weights: {shown}{more}")
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        why = "which improvers and training change; else it is another float model"
        print(f"not as in the float model: {', '.join(others[:5])}{more} (in floating point), {why}")
    print(_told_of_run(traced, why_not))
    print(f"files: every byte as the manifest says ({count} quantised layers); manifest SHA-256 {digest}")
    if wrong:
        print(f"problem: {len(wrong)} layer(s) whose bits differ from the specification: {', '.join(wrong[:5])}")
    else:
        print("all is well")


def _told_of_run(traced: list[FloatMatrix] | None, why_not: str) -> str:
    """One line: what the model multiplies by in floating point, or that this was not checked, and why."""
    if traced is None:
        return f"Floating-point layers were not checked; {why_not}"
    multiplied = [one for one in traced if one.use == MULTIPLIED]
    if not multiplied:
        return "run once: nothing that the model holds is multiplied in floating point"
    shown = "; ".join(f"{m.name} ({', '.join(m.ops)}, {m.share:.1%}): {m.reason}" for m in multiplied[:5])
    more = f"; {len(multiplied) - 5} more" if len(multiplied) > 5 else ""
    share = sum(m.share for m in multiplied)
    summary = f"{len(multiplied)} matrices are multiplied in floating point, {share:.1%} of the weights"
    return f"run once: {summary}: {shown}{more}"
