"""Exported models, run by onnxruntime itself: same bits where they are promised, integer kernels by its own graph."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import python
from onnx_files import names, needs_vnni, run, saturates
from torch import Tensor, nn

import pyquant
from pyquant import (
    FP16,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A16,
    QConv2d,
    QEmbedding,
    QLinear,
    QScheme,
    W4A8Dynamic,
    W4A8TwoLevel,
    W4A8TwoLevelDynamic,
    W8A8Dynamic,
)
from pyquant.errors import ArgumentError, QuantizationWarning, UnsupportedError
from pyquant.integrations.onnx import export
from pyquant.integrations.onnx.export import check_packages
from pyquant.nn.chain import Quantize

FREE = torch.export.Dim.DYNAMIC


def linear(k: int, n: int, scheme: QScheme, activation: str | None = None, **numbers: Any) -> QLinear:
    given = {"input_scale": 0.03, **numbers} if scheme.is_static else numbers
    return QLinear.from_float(nn.Linear(k, n), scheme, activation=activation, **given)


def conv(c: int, n: int, scheme: QScheme, **options: Any) -> QConv2d:
    given = {"input_scale": 0.03} if scheme.is_static else {}
    zero = {"input_zero_point": 5} if scheme.is_static and scheme.inputs and not scheme.inputs.symmetric else {}
    return QConv2d.from_float(nn.Conv2d(c, n, 3, **options), scheme, **given, **zero)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="onnx, onnxruntime or onnxscript is not installed",
)


@needs_packages
def test_dynamic_layers_give_their_own_bits_at_every_number_of_rows(tmp_path: Path) -> None:
    """Symmetric and affine inputs, per-channel 4-bit and two-level weights, rows of zeros, huge and tiny ones."""
    model = nn.Sequential(
        linear(64, 40, W8A8Dynamic(), "relu"),
        linear(40, 48, W8A8Dynamic(symmetric_inputs=False)),
        linear(48, 32, W4A8Dynamic(None)),
        nn.ReLU(),
        linear(32, 7, W4A8TwoLevelDynamic(16)),
    ).eval()
    path = tmp_path / "model.onnx"
    report = export(model, torch.randn(5, 3, 64), path, dynamic_shapes=({0: FREE, 1: FREE},))
    assert report.equal
    assert [(one.operators, one.runs_as) for one in report.layers] == [(("MatMulInteger",), "integer")] * 4
    for shape in ((1, 1, 64), (2, 9, 64), (33, 2, 64)):
        x = torch.randn(shape) * torch.logspace(-30, 30, shape[0])[:, None, None]
        x[-1, -1] = 0
        assert torch.equal(run(path, x)[0], model(x))


@needs_packages
@pytest.mark.parametrize("symmetric", [True, False])
def test_nan_and_infinity_stay_in_their_rows(tmp_path: Path, symmetric: bool) -> None:
    model = nn.Sequential(linear(16, 8, W8A8Dynamic(symmetric_inputs=symmetric))).eval()
    export(model, torch.randn(4, 16), tmp_path / "model.onnx")
    x = torch.randn(4, 16)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    (got,), wanted = run(tmp_path / "model.onnx", x), model(x)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert wanted.isnan().any(1).tolist() == [False, True, True, False]
    assert torch.equal(got[::3], wanted[::3])


@needs_packages
@needs_vnni
def test_static_layers_become_qgemm(tmp_path: Path) -> None:
    """Codes may differ by one where x / scale is a tie, and by the range's last code: runtimes count from -128."""
    model = nn.Sequential(
        linear(64, 48, W8A8()),
        nn.ReLU(),
        linear(48, 32, W8A8(symmetric_inputs=False), "gelu", input_zero_point=-3),
        linear(32, 8, W4A8TwoLevel(16)),
    ).eval()
    report = export(model, torch.randn(5, 3, 64), tmp_path / "model.onnx", dynamic_shapes=({0: FREE},))
    assert [one.operators for one in report.layers] == [("QGemm",)] * 3
    assert report.outputs[0].relative_error < 5e-3
    x = torch.randn(1, 3, 64)
    assert torch.allclose(run(tmp_path / "model.onnx", x)[0], model(x), atol=5e-3)


@needs_packages
@saturates
def test_the_report_shows_where_onnxruntime_saturates(tmp_path: Path) -> None:
    """Weights of full range, whose pairs of products leave 16 bits; of half the range none does."""
    x = torch.rand(5, 64) * 3.8
    errors, told = [], []
    for top in (127, 63):
        codes = torch.randint(top // 2, top + 1, (32, 64), dtype=torch.int8)
        layer = QLinear.from_codes(codes, torch.full((32,), 0.01), scheme=W8A8(), input_scale=0.03)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", QuantizationWarning)
            report = export(nn.Sequential(layer).eval(), x, tmp_path / f"{top}.onnx")
        told.append([str(one.message) for one in caught if one.category is QuantizationWarning])
        assert report.layers[0].operators == ("QGemm",)
        errors.append(report.outputs[0].relative_error)
    assert errors[0] > 0.05
    assert errors[1] < 5e-3
    assert re.search(r"no VNNI.*session.x64quantprecision=1 .* differences are (0 |0\.00|.*e-)", *told[0])
    assert told[1] == []


@needs_packages
def test_a_bias_that_is_no_int32_is_added_in_floating_point(tmp_path: Path) -> None:
    """A channel that pruning left almost nothing of has a scale so small that its bias overflows."""
    float_layer = nn.Linear(16, 4)
    with torch.no_grad():
        float_layer.weight[1] *= 1e-12
        float_layer.bias.fill_(100.0)
    model = nn.Sequential(QLinear.from_float(float_layer, W8A8(), input_scale=0.03)).eval()
    report = export(model, torch.randn(5, 16), tmp_path / "model.onnx")
    assert (report.layers[0].form, report.layers[0].runs_as, report.equal) == ("MatMulInteger", "integer", True)


@needs_packages
@needs_vnni
def test_codes_between_layers_are_codes_in_onnxruntime_too(tmp_path: Path) -> None:
    first = linear(64, 32, W8A8()).with_outputs(pyquant.TensorScheme(), torch.tensor([0.05]))
    model = nn.Sequential(Quantize(0.03), first, linear(32, 8, W8A8(), input_scale=0.05)).eval()
    report = export(model, torch.randn(5, 64), tmp_path / "model.onnx")
    assert [one.operators for one in report.layers] == [("QGemm",)] * 2
    assert report.outputs[0].relative_error < 5e-3


@needs_packages
@pytest.mark.parametrize("opset", [21, 23])
def test_weight_only_layers_are_read_as_they_are_packed(tmp_path: Path, opset: int) -> None:
    """Groups, one scale a channel, zero points, a K that no block divides; 16-bit weights are float, and said to be."""
    model = nn.Sequential(
        linear(96, 70, W4A16(48, symmetric=False)),
        linear(70, 64, W4A16(None)),
        linear(64, 50, W8A16()),
        linear(50, 8, FP16()),
    ).eval()
    report = export(model, torch.randn(5, 96), tmp_path / "model.onnx", opset=opset)
    assert [(one.operators, one.runs_as) for one in report.layers[:3]] == [(("MatMulNBits",), "codes")] * 3
    assert (report.layers[3].runs_as, report.layers[3].why) == ("float", "its weights are float16")
    assert report.outputs[0].relative_error < 1e-3


class Net(nn.Module):
    """A look-up, a layer with a residual that is used twice, results in a dictionary, an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = QEmbedding.from_float(nn.Embedding(11, 64))
        self.block = linear(64, 64, W8A8Dynamic(), "relu")
        self.again = self.block
        self.head = nn.Linear(64, 3)

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        h = self.embed(ids) * scale
        h = self.block(h, h)
        return {"hidden": self.again(h), "logits": self.head(h)}


@needs_packages
def test_look_ups_residuals_and_shared_layers(tmp_path: Path) -> None:
    model = Net().eval()
    before = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    ids, scale = torch.randint(0, 11, (2, 5)), torch.rand(2, 5, 1)
    report = export(model, ids, tmp_path / "model.onnx", kwargs={"scale": scale})
    assert {name: id(module) for name, module in model.named_modules(remove_duplicate=False)} == before
    found = {one.name: (one.operators, one.runs_as) for one in report.layers}
    assert found == {
        "embed": (("Gather",), "codes"),
        "block": (("MatMulInteger",) * 2, "integer"),
        "head": ((), "float"),
    }
    assert report.outputs[0].equal
    assert report.outputs[1].relative_error < 1e-6


@needs_packages
def test_convolutions_give_their_own_bits(tmp_path: Path) -> None:
    """Padding that differs from side to side, strides, dilation, groups."""
    model = nn.Sequential(
        conv(4, 8, W8A8Dynamic(), padding="same", dilation=2),
        conv(8, 8, W8A8(symmetric_inputs=False), stride=2, padding=1),
        conv(8, 8, W8A8Dynamic(), padding=1, groups=8),
        nn.ReLU(),
        conv(8, 4, W4A8Dynamic(None), bias=False),
    ).eval()
    report = export(model, torch.randn(2, 4, 13, 16), tmp_path / "model.onnx", dynamic_shapes=({0: FREE},))
    assert [one.operators for one in report.layers] == [("ConvInteger",)] * 4
    assert report.equal
    x = torch.randn(3, 4, 13, 16)
    assert torch.equal(run(tmp_path / "model.onnx", x)[0], model(x))


@needs_packages
def test_trained_models_are_exported_as_what_they_become(tmp_path: Path) -> None:
    model = pyquant.prepare_qat_(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), W8A8Dynamic()).eval()
    report = export(model, torch.randn(5, 16), tmp_path / "model.onnx")
    assert [one.runs_as for one in report.layers] == ["integer", "integer"]
    assert report.outputs[0].relative_error < 1e-5
    assert type(model[0]).__name__ == "FakeQuantLinear"


@needs_packages
def test_tensorrt_gets_symmetric_pairs_and_int4_alone(tmp_path: Path) -> None:
    import onnx

    model = nn.Sequential(
        conv(4, 8, W8A8()),
        nn.Flatten(),
        linear(288, 48, W8A8()),
        linear(48, 32, W4A16(16)),
        linear(32, 8, W8A16()),
    ).eval()
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        report = export(model, torch.randn(2, 4, 8, 8), path, target="tensorrt")
    assert report.outputs[0].relative_error < 2e-2
    graph = onnx.load(str(path)).graph
    assert {node.domain for node in graph.node} == {""}
    assert not {node.op_type for node in graph.node} & {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}
    constants = {one.name: one for one in graph.initializer}
    assert constants["3.codes"].data_type == onnx.TensorProto.INT4
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert not onnx.numpy_helper.to_array(constants[node.input[2]]).any()


@needs_packages
def test_equal_zero_points_of_layers_are_told_apart_by_their_bits(tmp_path: Path) -> None:
    """The exporter keeps one of equal constants: those of two layers of 4 bits and one of 8."""
    model = nn.Sequential(
        linear(16, 16, W4A16(None)), linear(16, 16, W8A16()), linear(16, 16, W4A16(None)), linear(16, 16, W4A16(16))
    )
    report = export(model.eval(), torch.randn(3, 16), tmp_path / "model.onnx", target="tensorrt")
    assert report.outputs[0].relative_error < 2e-2  # onnxruntime reads blocks of INT4 beside activations of 8 bits


@needs_packages
def test_tensorrt_files_of_sequences_open_in_onnxruntime_too(tmp_path: Path) -> None:
    """onnxruntime 1.32 makes a Gemm of MatMul and Add, and pairs of another type around the Reshape that this needs."""
    model, path = nn.Sequential(linear(16, 8, W8A8()), nn.GELU(), linear(8, 4, W8A8())).eval(), tmp_path / "model.onnx"
    report = export(model, torch.randn(2, 3, 16), path, target="tensorrt", dynamic_shapes=({0: FREE, 1: FREE},))
    assert report.outputs[0].relative_error < 2e-2
    x = torch.randn(5, 7, 16)
    assert torch.allclose(run(path, x)[0], model(x), atol=0.05)


@needs_packages
def test_a_layer_that_onnxruntime_makes_float_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime 1.32 multiplies Q/DQ Gemm with a floating-point bias in floating point."""
    from pyquant.integrations.onnx import exchange, forms

    def as_pairs(layer: Any, codes: Tensor, scale: Tensor) -> nn.Module:
        return forms.DequantizedLinear(layer, codes, scale, 0, 8)

    monkeypatch.setattr(exchange.forms, "GemmLinear", as_pairs)
    model = nn.Sequential(linear(16, 8, W8A8())).eval()
    with pytest.warns(QuantizationWarning, match="0: .* its weights after they are dequantised"):
        report = export(model, torch.randn(5, 16), tmp_path / "model.onnx")
    assert [one.name for one in report.not_integer] == ["0"]


@needs_packages
def test_onnxruntime_multiplies_a_bias_by_the_scale_of_its_row(tmp_path: Path) -> None:
    """Why accumulators are scaled twice: it fuses scales that were multiplied first. If this fails it was mended."""
    from pyquant.integrations.onnx import forms

    class Fused(forms.IntegerLinear):
        def product(self, x: Tensor) -> Tensor:
            v, scale, _ = self.inputs(x)
            acc = forms.operators.matmul_integer(v.to(torch.int8), self.codes)
            return self.plus_bias(acc.to(torch.float32) * (scale * self.scale))

    layer = linear(16, 8, W8A8Dynamic())
    form = nn.Sequential(Fused(layer, layer.codes, layer.weight_scale)).eval()
    x = torch.randn(5, 16)
    torch.onnx.export(form, (x,), dynamo=True, opset_version=21, verbose=False).save(str(tmp_path / "m.onnx"))
    assert (run(tmp_path / "m.onnx", x)[0] - layer(x)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("layer", "target", "why"),
    [
        (linear(64, 8, W4A8Dynamic(32)), "onnxruntime", "scales by groups"),
        (linear(64, 8, W4A8(32)), "tensorrt", "scales by groups"),
        (linear(64, 8, W4A4(None)), "onnxruntime", "4-bit activations"),
        (linear(60, 8, W4A16(20)), "onnxruntime", "not 20"),
        (linear(64, 8, W8A8Dynamic()), "tensorrt", "per token"),
        (linear(64, 8, W8A8(symmetric_inputs=False), input_zero_point=1), "tensorrt", "symmetric_inputs=True"),
        (linear(64, 8, W4A16(32, symmetric=False)), "tensorrt", "symmetric=True"),
        (conv(32, 8, W4A16(32)), "onnxruntime", "groups of 32"),
        (conv(4, 8, W8A8Dynamic(symmetric_inputs=False)), "onnxruntime", "one zero point"),
        (QLinear(8, 8, scheme=W8A8()), "onnxruntime", "it lacks input_scale"),
    ],
    ids=str,
)
@needs_packages
def test_what_has_no_form_is_refused_by_name(layer: nn.Module, target: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s)1 layers have no form.*part: .*{why}"):
        export(nn.ModuleDict({"part": layer}).eval(), torch.randn(1), tmp_path / "m.onnx", target=target)
    assert not list(tmp_path.iterdir())


@needs_packages
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"target": "tflite"}, "target"),
        ({"opset": 20}, "opset"),
        ({"opset": True}, "opset"),
        ({"path": "model.pt"}, "path"),
        ({"path": "nowhere/model.onnx"}, "path"),
        ({"model": nn.Sequential(nn.Linear(8, 8)).train()}, "model"),
        ({"model": 3}, "model"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], argument: str, tmp_path: Path) -> None:
    given = {"model": nn.Sequential(linear(8, 8, W8A8Dynamic())).eval(), "path": "model.onnx", **change}
    with pytest.raises(ArgumentError) as caught:
        export(given.pop("model"), torch.ones(1, 8), tmp_path / given.pop("path"), **given)
    assert caught.value.argument == argument


def test_missing_and_old_packages_are_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    versions = {"onnxruntime": "1.17.3", "onnx": "1.23.2"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UnsupportedError, match=r"(?s)runtime is 1.17.3, older than 1.31.*script is not") as caught:
        check_packages()
    # by their names, which are the same for either wheel of pyquant
    needed = ["onnx>=1.23", "onnxruntime>=1.31", "onnxscript>=0.7"]
    assert f"pip install {' '.join(map(repr, needed))}" in str(caught.value)
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\nonnx = {json.dumps(needed)}\n" in project


def test_import_brings_none_of_the_packages(tmp_path: Path) -> None:
    found = python(
        "import sys, json, pyquant, pyquant.integrations.onnx\n"
        "names = {n.partition('.')[0] for n in sys.modules}\n"
        "print(json.dumps(sorted(names & {'onnx', 'onnxruntime', 'onnxscript', 'onnx_ir', 'ml_dtypes'})))",
        tmp_path,
    )
    assert found == []


@needs_packages
def test_the_command_writes_the_file_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyquant.cli.main import main
    from pyquant.report.records.record import load_record

    (tmp_path / "onnx_net.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = pyquant.quantize_(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), W8A8Dynamic()).eval()
    pyquant.save_pretrained(model, "saved")
    words = ["export", "saved", "model.onnx", "--model", "onnx_net:build", "--dynamic-batch", "--report", "r.json"]
    words += ["--input-names", "pixels", "--output-names", "logits"]
    assert main(words) == 0
    assert "MatMulInteger" in capsys.readouterr().out
    x = torch.randn(7, 16)
    assert torch.equal(run(tmp_path / "model.onnx", x)[0], model(x))
    assert names(tmp_path / "model.onnx") == (["pixels"], ["logits"])
    assert load_record("r.json").equal
    assert main(["report", "r.json", "--out", "."]) == 0
    sys.modules.pop("onnx_net", None)
