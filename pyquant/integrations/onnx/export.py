"""export: a quantised model becomes an ONNX file, and onnxruntime's own view of it a report."""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pyquant.core import arguments
from pyquant.core.qtensor import QTensor
from pyquant.errors import ArgumentError, QuantizationWarning, UnsupportedError
from pyquant.integrations.onnx import look
from pyquant.integrations.onnx.compared import compare_outputs
from pyquant.integrations.onnx.exchange import ONNXRUNTIME, TARGETS, converted, exchanged, plain
from pyquant.integrations.onnx.names import check_names, check_number, name_values
from pyquant.integrations.onnx.operators import OPSET
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.report import quantization_report
from pyquant.report.records.onnx_export import OnnxExport, OnnxLayer

# The oldest that the forms were tried with. Newer ones may do other things with them: the report shows what they do.
FLOORS: Final = {"onnx": (1, 23), "onnxruntime": (1, 31), "onnxscript": (0, 7)}
LAST_OPSET: Final = 23
FLOAT: Final = "float"


def export(
    model: nn.Module,
    args: Any,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: str = ONNXRUNTIME,
    dynamic_shapes: Any = None,
    opset: int = OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> OnnxExport:
    """Write a quantised model as an ONNX file, and tell what onnxruntime makes of every layer.

    model   nn.Module in eval mode on a CPU with QLinear, QConv2d or QEmbedding layers, or after prepare_qat_; it is
            left as it is.
    args, kwargs   of a call, as torch.onnx.export takes them: a tensor or a tuple; the results are compared on them.
    path    of the file; weights of more than 2 GB lie beside it in FILE.data.
    target  'onnxruntime': dynamic int8 layers give the bits of QLinear; static ones are Q/DQ in the form that becomes
            QGemm; W4A16 and W8A16 are MatMulNBits. 'tensorrt': symmetric Q/DQ alone, INT4 by blocks.
    dynamic_shapes   as in torch.onnx.export; None: the shapes of args.
    opset   21 to 23.
    input_names, output_names   of the file, one for each tensor, in the order of args, then kwargs, and of the model's
            results; None: what torch.onnx.export calls them.
    ->      OnnxExport: what each layer became and why, and how far the results are from the model's. A
            QuantizationWarning names integer layers that onnxruntime would multiply in floating point, and says so
            where the results are another model's, or where sums saturate on this CPU (docs/onnx.md).
    Raises ArgumentError; UnsupportedError naming every layer that has no form, or a package that is missing or older
    than tried. Source: docs/onnx.md.
    """
    _check(model, target, opset)
    check_names(input_names, output_names)
    versions = check_packages()
    args = args if isinstance(args, tuple) else (args,)
    named = dict(kwargs or {})
    given = [x for x in pytree.tree_leaves((args, named)) if isinstance(x, Tensor)]
    check_number("input_names", input_names, len(given), "tensor of args and kwargs")
    whole = converted(model)
    copied, layers = exchanged(whole, target)
    with torch.inference_mode():
        results = _results(model, args, named)
    _check_results(results)
    wanted = plain(results)
    check_number("output_names", output_names, len(wanted), "tensor of the model's results")
    with tempfile.TemporaryDirectory(prefix=".pyquant-onnx-", dir=_folder(path)) as folder:
        made = Path(folder) / Path(path).name
        constants = _write(copied, args, named, made, dynamic_shapes, opset, (input_names, output_names))
        session = look.Session(made)
        outputs, far = compare_outputs(session, given, wanted)
        for file in Path(folder).iterdir():
            os.replace(file, Path(path).parent / file.name)
    rows = [_layer(names, layer, copied, session, constants) for names, layer in layers]
    rows += _float_rows(whole)
    report = OnnxExport(str(path), target, opset, versions, tuple(rows), outputs)
    if target == ONNXRUNTIME and report.not_integer:
        lines = "".join(f"\n  {row.name}: {row.why}" for row in report.not_integer)
        warnings.warn(
            f"onnxruntime multiplies these layers in floating point:{lines}", QuantizationWarning, stacklevel=2
        )
    if far:
        warnings.warn(far, QuantizationWarning, stacklevel=2)
    return report


def _check(model: object, target: object, opset: object) -> None:
    whole = arguments.module("model", model)
    if target not in TARGETS:
        raise ArgumentError("target", repr(target), " or ".join(map(repr, TARGETS)))
    if isinstance(opset, bool) or not isinstance(opset, int) or not OPSET <= opset <= LAST_OPSET:
        raise ArgumentError("opset", repr(opset), f"{OPSET} to {LAST_OPSET}")
    if any(part.training for part in whole.modules()):
        raise ArgumentError("model", "a model in training mode", "model.eval()")
    where = {t.device.type for t in (*whole.parameters(), *whole.buffers())} - {"cpu"}
    if where:
        raise ArgumentError("model", f"a model on {', '.join(sorted(where))}", "a model on a CPU: model.cpu()")
    if any(t.dtype == torch.bfloat16 for t in (*whole.parameters(), *whole.buffers())):
        got = "a model in bfloat16, in which onnxruntime has few operators on a CPU"
        raise ArgumentError("model", got, "float32 or float16: model.float(), which leaves codes as they are")


def check_packages() -> dict[str, str]:
    """{package: version} of what an export needs. Raises UnsupportedError for one that is missing or too old."""
    found: dict[str, str] = {"torch": str(torch.__version__)}
    wrong: list[str] = []
    for name, floor in FLOORS.items():
        oldest = ".".join(map(str, floor))
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        if tuple(int(part) for part in found[name].split(".")[:2]) < floor:
            wrong.append(f"{name} is {found[name]}, older than {oldest}")
    if wrong:
        needed = " ".join(f"'{name}>={'.'.join(map(str, floor))}'" for name, floor in FLOORS.items())
        raise UnsupportedError(f"an ONNX export needs more: pip install {needed}", wrong)
    return found


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).parent
    if Path(path).suffix != ".onnx" or not folder.is_dir():
        raise ArgumentError("path", str(path), "a name that ends in .onnx, in a folder that exists")
    return folder


def _results(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What the model gives for copies of the arguments: one that writes to them must not change what is exported."""
    args, kwargs = copy.deepcopy((args, kwargs))
    return pytree.tree_leaves(model(*args, **kwargs), is_leaf=lambda one: isinstance(one, QTensor))


def _check_results(results: list[Any]) -> None:
    """Raise ArgumentError for results that no file holds."""
    others = {type(one).__name__ for one in results if not isinstance(one, (Tensor, QTensor, int, float, type(None)))}
    if others:
        how = "tensors alone; of a decoder of transformers: kwargs={'use_cache': False}"
        raise ArgumentError("model", f"results of type {', '.join(sorted(others))}", how)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch and onnxscript say about themselves at every export: packages that they do without, old names
    that they use, patterns that they do not simplify."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _write(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: Path,
    dynamic_shapes: Any,
    opset: int,
    names: tuple[Sequence[str] | None, Sequence[str] | None],
) -> dict[str, Any]:
    """The file, checked by onnx; -> its constants by name."""
    import onnx

    if args and isinstance(args[-1], dict):
        args = (*args, {})  # or torch.onnx would take it for arguments by name
    with torch.no_grad(), _quietly():
        program = torch.onnx.export(
            model, args, kwargs=kwargs, dynamo=True, dynamic_shapes=dynamic_shapes, opset_version=opset, verbose=False
        )
    if program is None:
        raise UnsupportedError("torch.onnx.export gave no program")
    constants = program.model.graph.initializers
    _store_four_bits(model, constants)
    _keep_products_apart(program.model.graph)
    name_values(program.model.graph, *names)
    program.save(str(path))
    onnx.checker.check_model(str(path))
    return dict(constants)


def _store_four_bits(model: nn.Module, constants: Any) -> None:
    """Constants of 4-bit codes as INT4, which torch has no type for."""
    import onnx_ir

    for name, module in model.named_modules():
        constant = constants.get(f"{name}.codes" if name else "codes")
        if getattr(module, "bits", 8) != 4 or constant is None or module.codes.dtype != torch.int8:
            continue
        for use in constant.uses():
            zero = use.node.inputs[2]  # the exporter keeps one of equal constants: other layers', of 8 bits too
            own = onnx_ir.Value(name=f"{constant.name.removesuffix('codes')}zero_points_int4", shape=zero.shape)
            _to_four_bits(own, zero.const_value.numpy())
            constants[own.name] = own
            use.node.replace_input_with(use.idx + 2, own)
            if not zero.uses():
                del constants[zero.name]
        _to_four_bits(constant, constant.const_value.numpy())


def _to_four_bits(constant: Any, numbers: Any) -> None:
    import ml_dtypes
    import onnx_ir

    constant.const_value = onnx_ir.tensor(numbers.astype(ml_dtypes.int4), name=constant.name)
    constant.type = onnx_ir.TensorType(onnx_ir.DataType.INT4)


def _keep_products_apart(graph: Any) -> None:
    """A Flatten, which does nothing to rows, between a Gemm of codes and what is computed of its result: onnxruntime
    1.32 joins Gemm and the Relu or Clip before a QuantizeLinear into one floating-point operator before it looks for
    the codes."""
    import onnx_ir

    for node in list(graph):
        weight = node.inputs[1].producer() if node.op_type == "Gemm" else None
        if weight is None or weight.op_type != "DequantizeLinear":
            continue
        (rows,) = node.outputs
        readers = [use for use in rows.uses() if use.node.op_type not in ("QuantizeLinear", "Reshape")]
        if not readers:
            continue
        flat = onnx_ir.node("Flatten", [rows], {"axis": 1})
        flat.outputs[0].shape, flat.outputs[0].type = rows.shape, rows.type
        graph.insert_after(node, flat)
        for reader in readers:
            reader.node.replace_input_with(reader.idx, flat.outputs[0])


def _layer(
    names: list[str], layer: Any, copied: nn.Module, session: look.Session, constants: dict[str, Any]
) -> OnnxLayer:
    form: Any = copied.get_submodule(names[0])
    constant = look.constant_of(constants, names, form.codes) if form.is_called else None
    operators = () if constant is None else tuple(session.operators_of(constant))
    runs_as, why = _verdict(layer, form, operators, constant is None)
    return OnnxLayer(names[0], str(layer.scheme), str(form.operator), operators, runs_as, why)


def _verdict(layer: Any, form: Any, operators: tuple[str, ...], is_gone: bool) -> tuple[str, str]:
    if layer.scheme.is_float:
        return "float", f"its weights are {layer.scheme.float_dtype}"
    if form.is_read and not form.is_called:
        return "float", "the code around it computes with its weight and does not call it"
    if not form.is_called:
        return "unused", "forward does not reach it"
    if is_gone:
        return "constant", "its result is the same for all inputs and stands in the file"
    if isinstance(layer, QEmbedding):
        return "codes", "rows are looked up as codes"
    if operators and all(one in look.INTEGER for one in operators):
        return "integer", "codes times codes"
    if operators and all(one in look.PACKED for one in operators):
        return "codes", "weights are read as codes, activations are floating point"
    how = f"{', '.join(operators)} reads" if operators else "a floating-point product reads"
    return "float", f"{how} its weights after they are dequantised"


def _float_rows(model: nn.Module) -> list[OnnxLayer]:
    """What holds matrices and is not quantised, whatever class it has."""
    return [
        OnnxLayer(one.name, FLOAT, one.kind, (), FLOAT, one.reason or "it is not quantised")
        for one in quantization_report(model)
        if one.scheme == FLOAT
    ]
