"""Models as others write them, exported: every layer integer or named, the results those of the model."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import architecture_table
import onnx_files
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant.errors import ArgumentError
from pyquant.integrations.onnx import export
from pyquant.report.records.onnx_export import OnnxExport
from pyquant.report.records.record import load_record

FREE = torch.export.Dim.DYNAMIC
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="onnx, onnxruntime or onnxscript is not installed",
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def quantised(model: nn.Module, scheme: Any = "W8A8Dynamic", **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pyquant.quantize_(model.eval(), scheme, check_speed=False, **options)


# ---- architectures of other libraries

# An embedding with a forward of its own, a convolution whose type is asked for; of one layer, as the exporter's time
# is that of its layers. At night all, of two.
QUICK = {
    "OPT": architecture_table.text("OPT", ffn_dim=128, word_embed_proj_dim=64, num_hidden_layers=1),
    "ViT": architecture_table.vision("ViT", num_hidden_layers=1),
}
REFUSED = {"Mixtral"}  # experts


def seen(model: nn.Module, inputs: dict[str, Any]) -> dict[str, list[Tensor]]:
    """{name: what a quantised product is called with} in a pass through the model."""
    found: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: found.setdefault(name, []).append(args[0].clone()))
        for name, module in model.named_modules()
        if isinstance(module, (pyquant.QLinear, pyquant.QConv2d))
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return found


def constant_layers(model: nn.Module, inputs: dict[str, Any], others: dict[str, Any]) -> set[str]:
    """Products whose arguments are the same for other inputs of the model: DeBERTa's positions, SigLIP's probe."""
    assert all(not torch.equal(x, others[name]) for name, x in inputs.items())
    one, other = seen(model, inputs), seen(model, others)
    return {name for name, xs in one.items() if all(map(torch.equal, xs, other[name]))}


def exported(make: Any, path: Path, scheme: str) -> tuple[OnnxExport, Any, set[str]]:
    (model, inputs), (_, others) = (make() for _ in range(2))
    data = {"data": [inputs]} if scheme == "W8A8" else {}
    model = quantised(model, scheme, embeddings=True, heads=True, **data)
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    return export(model, (), path, kwargs=inputs), model, constant_layers(model, inputs, others)


def check(name: str, path: Path, scheme: str = "W8A8Dynamic", make: Any = None) -> None:
    report, model, constant = exported(make or architecture_table.QUICK[name], path, scheme)
    assert bool(constant) == (name in ("DeBERTa", "SigLIP"))
    rows = {row.name: row for row in report.layers}
    for layer, module in model.named_modules():
        if isinstance(module, (pyquant.QLinear, pyquant.QConv2d)):
            row = rows[layer]
            expected = "constant" if layer in constant else "integer"
            assert row.runs_as == expected or row.why.startswith("the code around it"), row
        elif isinstance(module, pyquant.QEmbedding):
            assert rows[layer].runs_as in ("codes", "constant", "unused") or rows[layer].why, rows[layer]
    assert any(row.runs_as == "integer" for row in report.layers)
    assert not [row for row in report.layers if row.runs_as == "float" and not row.why]
    assert max(one.relative_error for one in report.outputs) < (1e-3 if scheme == "W8A8Dynamic" else 0.1)


@pytest.mark.parametrize("name", QUICK)
def test_architectures_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check(name, tmp_path / "model.onnx", make=QUICK[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in architecture_table.QUICK if name not in REFUSED])
def test_more_architectures_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check(name, tmp_path / "model.onnx")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["BERT", "T5", "BART", "Llama", "ViT", "ResNet", "SegFormer"])
def test_architectures_in_static_schemes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check(name, tmp_path / "model.onnx", "W8A8")


def test_a_cache_among_the_results_is_refused_with_what_to_say(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, inputs = architecture_table.QUICK["Llama"]()
    with pytest.raises(ArgumentError, match=r"results of type DynamicCache.*use_cache.: False"):
        export(quantised(model), (), tmp_path / "model.onnx", kwargs=inputs)
    assert not list(tmp_path.iterdir())


def test_the_command_exports_an_encoder_with_a_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose configuration is another one than the model's."""
    transformers = pytest.importorskip("transformers")
    from pyquant.cli.main import main

    monkeypatch.chdir(tmp_path)
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 120}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, feed_forward_proj="gated-gelu")
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained("float")
    pyquant.save_pretrained(quantised(model), "saved")
    assert main(["export", "saved", "model.onnx", "--model", "float", "--report", "report.json"]) == 0
    report = load_record("report.json", OnnxExport)
    assert sum(row.runs_as == "integer" for row in report.layers) == 18
    assert not report.not_integer


def test_the_command_exports_a_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would give its cache, and takes ids: neither has to be said."""
    pytest.importorskip("transformers")
    from pyquant.cli.main import main

    monkeypatch.chdir(tmp_path)
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
    model, _ = architecture_table.text("Qwen3", **sizes)()
    model.save_pretrained("float")
    pyquant.save_pretrained(quantised(model), "saved")
    assert main(["export", "saved", "model.onnx", "--model", "float", "--dynamic-batch"]) == 0
    ids = torch.randint(0, 119, (3, 8))
    (got,) = onnx_files.run(tmp_path / "model.onnx", ids)
    assert torch.allclose(got, model(ids).last_hidden_state, atol=1e-4)


# ---- the comparison


class Masked(nn.Module):
    """Results with infinities and a NaN in their places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.where(y < 0, -torch.inf, torch.where(y > 0.5, torch.nan, y))


def test_infinities_and_nan_of_a_model_are_equal_to_themselves(tmp_path: Path) -> None:
    x = torch.randn(9, 8)
    model = quantised(Masked())
    assert model(x).isinf().any()
    assert model(x).isnan().any()
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        report = export(model, x, tmp_path / "model.onnx")
    assert (report.equal, report.outputs[0].relative_error, report.outputs[0].max_error) == (True, 0.0, 0.0)


def test_results_of_another_model_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyquant.integrations.onnx import lookups

    monkeypatch.setattr(lookups, "like", lambda layer, form: form)  # drops the forward of an embedding's class
    model = quantised(nn.Sequential(Shifted(10, 8), nn.Linear(8, 4)), embeddings=True)
    with pytest.warns(pyquant.QuantizationWarning, match="results are not the model's: relative differences"):
        export(model, torch.randint(0, 8, (2, 3)), tmp_path / "model.onnx")


class Twice(nn.Module):
    """Gives one result twice, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, more: Tensor) -> tuple[Tensor, ...]:
        y = self.second(torch.relu(self.first(x))) + more
        return y, y, x


def test_inputs_and_outputs_have_the_names_that_were_chosen(tmp_path: Path) -> None:
    """relu and x are names of values inside, too."""
    model, path = quantised(Twice()), tmp_path / "model.onnx"
    x, more = torch.randn(3, 16), torch.randn(3, 8)
    names = {"input_names": ["more", "ids"], "output_names": ["relu", "same", "x"]}
    report = export(model, (x,), path, kwargs={"more": more}, **names)
    assert [row.runs_as for row in report.layers] == ["integer", "integer"]
    assert onnx_files.names(path) == (["more", "ids"], ["relu", "same", "x"])
    assert all(torch.equal(a, b) for a, b in zip(onnx_files.run(path, x, more), model(x, more), strict=True))
    export(model, (x, more), path, output_names=["y", "same", "third"])
    assert onnx_files.names(path)[1] == ["y", "same", "third"]


@pytest.mark.parametrize(
    ("names", "argument", "got"),
    [
        ({"input_names": ["a"]}, "input_names", "1: a; allowed: 2, one for each tensor of args and kwargs"),
        ({"output_names": ["a", "b"]}, "output_names", "2: a, b; allowed: 3, one for each"),
        ({"input_names": ["a", "a"]}, "input_names", "'a' twice"),
        ({"input_names": ["a", "b"], "output_names": ["c", "b", "d"]}, "output_names", "'b', which is in input_names"),
        ({"input_names": ["a", ""]}, "input_names", "''"),
        ({"input_names": "ab"}, "input_names", "an iterable of names"),
        ({"output_names": ["a", "first.codes", "b"]}, "output_names", "'first.codes'; allowed: names that no param"),
    ],
    ids=str,
)
def test_names_that_cannot_be_taken_are_refused(names: dict[str, Any], argument: str, got: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        export(quantised(Twice()), (torch.randn(3, 16), torch.randn(3, 8)), tmp_path / "model.onnx", **names)
    assert caught.value.argument == argument
    assert not list(tmp_path.iterdir())


# ---- what models do with their layers


class Shifted(nn.Embedding):
    """Positions from 2 on, scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 2) * 3.0


def test_an_embedding_with_a_forward_of_its_own_keeps_it(tmp_path: Path) -> None:
    model = quantised(nn.Sequential(Shifted(10, 8), nn.Linear(8, 4)), embeddings=True)
    report = export(model, torch.randint(0, 8, (2, 3)), tmp_path / "model.onnx", dynamic_shapes=({0: FREE},))
    assert report.equal
    assert [row.runs_as for row in report.layers] == ["codes", "integer"]
    ids = torch.randint(0, 8, (5, 3))
    assert torch.equal(onnx_files.run(tmp_path / "model.onnx", ids)[0], model(ids))


class Looking(nn.Module):
    """Asks its layers for types and sizes, multiplies by the weight of one and by the rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.table = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.to(self.first.weight.dtype)) * self.first.in_features + self.table.num_embeddings
        return F.linear(y, self.other.weight) + y @ self.table.weight


def test_what_a_layer_shows_its_form_shows_too(tmp_path: Path) -> None:
    model = quantised(Looking(), embeddings=True)
    with pytest.warns(pyquant.QuantizationWarning, match="other: the code around it computes with its weight"):
        report = export(model, torch.randn(3, 8), tmp_path / "model.onnx")
    assert {row.name: row.runs_as for row in report.layers} == {"first": "integer", "other": "float", "table": "float"}
    assert report.outputs[0].relative_error < 1e-6


class Net(nn.Module):
    """A look-up of fixed positions, two layers with the same numbers, one that forward does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.a, self.b, self.c = nn.Embedding(4, 8), *(nn.Linear(8, 8) for _ in range(3))
        self.b.load_state_dict(self.a.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x + self.positions(torch.arange(4)))))


def test_constants_equal_layers_and_unused_ones_are_told_apart(tmp_path: Path) -> None:
    report = export(quantised(Net(), embeddings=True), torch.randn(3, 4, 8), tmp_path / "model.onnx")
    assert {row.name: row.runs_as for row in report.layers} == {
        "positions": "constant",
        "a": "integer",
        "b": "integer",
        "c": "unused",
    }
    assert report.equal


def test_whatever_holds_a_matrix_is_named(tmp_path: Path) -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.up, self.body = (
                nn.Conv1d(4, 4, 3, padding=1),
                nn.ConvTranspose1d(4, 4, 2, 2),
                nn.Linear(8, 8),
            )
            self.pair, self.matrix = nn.Bilinear(8, 8, 4), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(self.up(self.line(x))) @ self.matrix
            return self.pair(y, y)

    report = export(quantised(Others()), torch.randn(2, 4, 4), tmp_path / "model.onnx")
    rows = {row.name: row for row in report.layers}
    assert {name for name, row in rows.items() if row.runs_as == "float"} == {"", "line", "up", "pair"}
    assert rows["body"].runs_as == "integer"
    assert "Conv1d" in rows["line"].why
    assert all(row.why for row in rows.values())


# ---- layers around layers


def test_turned_layers_give_their_own_bits(tmp_path: Path) -> None:
    turned = pyquant.HadamardLinear.from_linear
    model = quantised(nn.Sequential(turned(nn.Linear(24, 8)), nn.GELU(), turned(nn.Linear(8, 8))), "W8A8Dynamic")
    report = export(model, torch.randn(3, 24), tmp_path / "model.onnx")
    assert [row.operators for row in report.layers] == [("MatMulInteger",)] * 2
    assert report.outputs[0].relative_error < 1e-6
    (first,) = model[:1]
    alone = nn.Sequential(first).eval()
    assert export(alone, torch.randn(3, 24), tmp_path / "model.onnx", dynamic_shapes=({0: FREE},)).equal
    x = torch.randn(7, 24)
    assert torch.equal(onnx_files.run(tmp_path / "model.onnx", x)[0], alone(x))


class Added(nn.Module):
    """The end of a residual block, and a layer that takes its codes."""

    def __init__(self) -> None:
        super().__init__()
        self.add, self.last = pyquant.QResidualAdd(nn.Linear(16, 16), "relu"), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.add(x, x))


@onnx_files.needs_vnni
def test_a_sum_is_added_before_it_becomes_codes(tmp_path: Path) -> None:
    """The layer rounds the sum to codes, not its own result before the sum."""
    model, data = Added(), [torch.randn(64, 16) * 3]
    model = quantised(model, "W8A8", data=data)
    out = model.add(data[0], data[0]).abs().max() / 127
    model.add.layer = model.add.layer.with_outputs(pyquant.TensorScheme(), out.reshape(1))
    model.last = pyquant.QLinear.from_float(model.last.to_float(), pyquant.W8A8(), input_scale=out)
    report = export(model.eval(), data[0], tmp_path / "model.onnx")
    assert report.outputs[0].relative_error < 5e-3
    assert all(row.runs_as == "integer" for row in report.layers)


@onnx_files.needs_vnni
@pytest.mark.parametrize(
    ("activation", "fuse"), [(nn.ReLU, False), (nn.ReLU, True), (nn.ReLU6, False), (nn.Sigmoid, False)], ids=str
)
def test_rows_of_static_layers_stay_integer_before_an_activation(
    activation: type[nn.Module], fuse: bool, tmp_path: Path
) -> None:
    """Of a matrix of rows: of more dimensions a Reshape stands between the product and the activation."""
    model, x = nn.Sequential(nn.Linear(32, 32), activation(), nn.Linear(32, 8)).eval(), torch.randn(16, 32)
    model = quantised(model, "W8A8", data=[x])
    if fuse:
        pyquant.fuse_(model)
    report = export(model, x, tmp_path / "model.onnx", dynamic_shapes=({0: FREE},))
    assert [row.operators for row in report.layers] == [("QGemm",)] * 2
    assert report.outputs[0].relative_error < 1e-2
    x = torch.randn(3, 32)
    assert torch.allclose(onnx_files.run(tmp_path / "model.onnx", x)[0], model(x), atol=0.05)


# ---- arguments


class Several(nn.Module):
    """Arguments in every form."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pair: list[Tensor], named: dict[str, Tensor], times: int = 1, other: Tensor | None = None) -> Any:
        return [self.a(pair[0]) - times * self.b(pair[1]), named["y"] + 2 * named["x"]]


def test_arguments_go_where_they_belong(tmp_path: Path) -> None:
    x = [torch.randn(3, 8) for _ in range(5)]
    model = quantised(Several())
    assert export(model, ([x[0], x[1]], {"y": x[2], "x": x[3]}), tmp_path / "model.onnx").equal
    given = {"other": x[4], "times": 3, "named": {"x": x[2], "y": x[3]}, "pair": [x[0], x[1]]}
    assert export(model, (), tmp_path / "model.onnx", kwargs=given).equal


def test_half_precision_is_exported_and_bfloat16_refused(tmp_path: Path) -> None:
    model = quantised(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).half())
    assert export(model, torch.randn(3, 16).half(), tmp_path / "model.onnx").equal
    with pytest.raises(ArgumentError, match=r"bfloat16.*model\.float\(\)"):
        export(model.bfloat16(), torch.randn(3, 16).bfloat16(), tmp_path / "other.onnx")
    assert export(model.float(), torch.randn(3, 16), tmp_path / "model.onnx").equal


def test_an_export_says_nothing_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch names four operators of a package that is not installed, at every export."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(quantised(nn.Sequential(nn.Linear(8, 8))), torch.randn(3, 8), tmp_path / "model.onnx")
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "")
