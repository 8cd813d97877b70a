"""Architectures of transformers in the schemes of docs/onnx.md's table: the graph has the forms that it names."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import architecture_table
import onnx_files
import pytest
import torch
from torch import nn

import pyquant
from pyquant.integrations.onnx import export
from pyquant.report.records.onnx_export import OnnxExport

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript", "transformers")),
    reason="onnx, onnxruntime, onnxscript or transformers is not installed",
)

MODELS = ("BERT", "ViT", "Llama")
# scheme: the forms of its linear layers for both targets, and the largest relative error of a result
FORMS = {
    "W8A8": ("Q/DQ Gemm", "Q/DQ MatMul", 0.05),
    "W4A8(group_size=None)": ("Q/DQ Gemm", "Q/DQ MatMul", 0.05),
    "W4A8TwoLevel(group_size=32)": ("Q/DQ Gemm", "Q/DQ MatMul", 0.05),
    "W4A16(group_size=32)": ("MatMulNBits", "DQ MatMul", 1e-4),
    "W4A16(group_size=None)": ("MatMulNBits", "DQ MatMul", 1e-4),
    "W8A16": ("MatMulNBits", "DQ MatMul", 1e-4),
    "W4A8Dynamic(group_size=None)": ("MatMulInteger", None, 1e-4),
}
CASES = [(model, scheme, target) for model in MODELS for scheme in FORMS for target in ("onnxruntime", "tensorrt")]
QUICK = ("ViT", "W4A16(group_size=32)", "tensorrt")


def made(name: str, scheme: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = architecture_table.QUICK[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"data": [inputs]} if "A8" in scheme and "Dynamic" not in scheme else {}
        if "group_size=32" in scheme:  # which convolutions have no form for
            options["filter_fn"] = lambda module, name: not isinstance(module, nn.Conv2d)
        model = pyquant.quantize_(model.eval(), scheme, check_speed=False, embeddings=True, heads=True, **options)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model, inputs


def layers_of(model: Any) -> dict[str, pyquant.QLinear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, pyquant.QLinear)}


class File:
    """An exported file as onnx reads it: who makes a value, what a constant holds."""

    def __init__(self, path: Path) -> None:
        import onnx

        onnx.checker.check_model(str(path), full_check=True)
        self.model = onnx.load(str(path))
        self.nodes = list(self.model.graph.node)
        self.constants = {one.name: one for one in self.model.graph.initializer}
        self.makers = {name: node for node in self.nodes for name in node.output}

    def array(self, name: str) -> Any:
        import onnx

        return onnx.numpy_helper.to_array(self.constants[name])

    def attributes(self, node: Any) -> dict[str, Any]:
        import onnx

        return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}

    def maker(self, name: str) -> Any:
        """The node that makes a value, shapes and types aside."""
        node = self.makers.get(name)
        while node is not None and node.op_type in ("Cast", "Reshape", "Transpose", "Flatten", "Identity"):
            node = self.makers.get(node.input[0])
        return node

    def readers(self, name: str) -> list[Any]:
        return [node for node in self.nodes if name in node.input]


@pytest.mark.parametrize(
    ("name", "scheme", "target"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.nightly) for case in CASES],
)
def test_the_graph_has_the_forms_of_the_table(name: str, scheme: str, target: str, tmp_path: Path) -> None:
    model, inputs = made(name, scheme)
    ours, theirs, error = FORMS[scheme]
    form: str | None = theirs if target == "tensorrt" else ours
    if "A16" in scheme and target == "tensorrt":
        error = 0.02  # onnxruntime takes activations of 8 bits to weights behind DequantizeLinear
    path = tmp_path / "model.onnx"
    if form is None:
        with pytest.raises(pyquant.UnsupportedError, match="per token"):
            export(model, (), path, kwargs=inputs, target=target)
        assert not list(tmp_path.iterdir())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        report = export(model, (), path, kwargs=inputs, target=target)
    rows = {row.name: row for row in report.layers}
    assert layers_of(model)
    for layer in layers_of(model):
        assert rows[layer].runs_as in ("integer", "codes", "float", "unused")
        assert rows[layer].form == form
    assert max(one.relative_error for one in report.outputs) < error
    file = File(path)
    assert [(one.domain, one.version) for one in file.model.opset_import if one.domain == ""] == [("", report.opset)]
    check = check_tensorrt if target == "tensorrt" else check_onnxruntime
    check(file, model, report)
    with torch.inference_mode():
        wanted = model(**inputs)[0]
    (got, *_) = onnx_files.run(path, *inputs.values())
    assert (got - wanted).norm() < error * wanted.norm()


def check_onnxruntime(file: File, model: Any, report: OnnxExport) -> None:
    """The operators of the exported graph; those of onnxruntime's own are the report's."""
    kinds = [node.op_type for node in file.nodes]
    for name, layer in layers_of(model).items():
        row = next(row for row in report.layers if row.name == name)
        if row.runs_as == "unused":
            continue
        if layer.scheme.is_weight_only:
            assert (row.operators, row.runs_as) == (("MatMulNBits",), "codes")
            (node,) = file.readers(f"{name}.codes")
            had, w = file.attributes(node), layer.scheme.weights
            assert (node.domain, had["bits"], had["K"], had["N"]) == (
                "com.microsoft",
                w.bits,
                layer.in_features,
                layer.out_features,
            )
            assert w.group_size in (None, had["block_size"])
        else:
            assert row.runs_as == "integer", row
    if all(layer.scheme.is_weight_only for layer in layers_of(model).values()):
        assert "QuantizeLinear" not in kinds


def check_tensorrt(file: File, model: Any, report: OnnxExport) -> None:
    """Standard operators, pairs with zero points of 0, codes behind DequantizeLinear alone."""
    import onnx

    assert {node.domain for node in file.nodes} == {""}
    assert not {node.op_type for node in file.nodes} & {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}
    for node in file.nodes:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert not file.array(node.input[2]).any()
            assert (file.array(node.input[1]) > 0).all()
        if node.op_type == "QuantizeLinear":
            assert [one.op_type for one in file.readers(node.output[0])] == ["DequantizeLinear"]
    for name, layer in layers_of(model).items():
        if next(row for row in report.layers if row.name == name).runs_as == "unused":
            continue
        (pair,) = file.readers(f"{name}.codes")
        (product,) = file.readers(pair.output[0])
        assert (pair.op_type, product.op_type) == ("DequantizeLinear", "MatMul")
        w, had = layer.scheme.weights, file.attributes(pair)
        by_blocks = w.group_size is not None and not w.two_level
        assert (had["axis"], had.get("block_size", 0)) == ((0, w.group_size) if by_blocks else (1, 0))
        four = w.bits == 4 and layer.scheme.is_weight_only and by_blocks  # TensorRT has INT4 by blocks alone
        kind = file.constants[f"{name}.codes"].data_type
        assert kind == (onnx.TensorProto.INT4 if four else onnx.TensorProto.INT8)
        given = file.maker(product.input[0])
        if layer.scheme.is_weight_only:
            assert given is None or given.op_type != "DequantizeLinear"
        else:
            assert given.op_type == "DequantizeLinear"
            assert file.maker(given.input[0]).op_type == "QuantizeLinear"
    for name, module in model.named_modules():
        if isinstance(module, pyquant.QEmbedding) and f"{name}.codes" in file.constants:
            (pair,) = file.readers(f"{name}.codes")
            (look_up,) = file.readers(pair.output[0])
            assert (pair.op_type, look_up.op_type) == ("DequantizeLinear", "Gather")


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["W8A8", "W4A16(group_size=32)", "W8A16"])
def test_every_opset_of_the_page_holds_a_decoder(scheme: str, tmp_path: Path) -> None:
    model, inputs = made("Llama", scheme)
    for opset in (21, 22, 23):
        for target in ("onnxruntime", "tensorrt"):
            path = tmp_path / f"{opset}.onnx"
            report = export(model, (), path, kwargs=inputs, target=target, opset=opset)
            found = {one.domain: one.version for one in File(path).model.opset_import}
            assert (report.opset, found[""]) == (opset, opset)
            assert max(one.relative_error for one in report.outputs) < max(FORMS[scheme][2], 0.02)


def test_weight_only_files_are_compared_as_they_are(tmp_path: Path) -> None:
    """onnxruntime would round the activations of a matrix of integer weights to 8 bits, and the report be of that."""
    model = nn.Sequential(nn.Linear(256, 256)).eval()
    pyquant.quantize_(model, pyquant.W4A16(group_size=32), check_speed=False)
    report = export(model, (torch.randn(16, 256),), tmp_path / "model.onnx", target="tensorrt")
    assert report.outputs[0].relative_error < 1e-5
