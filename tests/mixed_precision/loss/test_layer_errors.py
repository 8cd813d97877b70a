"""error_report says what brute force says, on integer and simulating models, and names what it leaves out."""

from __future__ import annotations

import copy
import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_banks import Bank, register_banks
from torch import Tensor, nn

import pyquant
from pyquant import error_report
from pyquant.errors import ArgumentError, CalibrationError, NonFiniteError
from pyquant.nn import expert_rules
from pyquant.report.error import error_table, write_errors
from pyquant.report.records.record import load_record


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.GELU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers)


def batches(n: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(n)]


def calibrated(floats: nn.Module, **words: object) -> nn.Module:
    model = pyquant.SelectiveQuantizer(verbose=False, **words).quantize_module(copy.deepcopy(floats))
    pyquant.QuantizationCalibrator().calibrate_model(model, batches(), num_calib_batches=3, percentile=98.0)
    return model


def brute(a: Tensor, b: Tensor) -> tuple[float, float, float, float, float]:
    a, b = a.detach().double().flatten(), b.detach().double().flatten()
    error = a - b
    cosine = float(a @ b / (a.norm() * b.norm()))
    sqnr = 10 * math.log10(float(b.square().sum() / error.square().sum()))
    return float(error.abs().mean()), float(error.square().mean()), float(error.abs().max()), sqnr, cosine


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_figure_is_that_of_brute_force(integers: bool, symmetric: bool) -> None:
    floats = net()
    model = calibrated(floats, scheme=pyquant.W8A8(symmetric_inputs=symmetric))
    fake = model[3].input_fake_quant
    scale, zero = fake.scale.double(), 0 if fake.zero_point is None else fake.zero_point
    low, high = fake.scheme.code_range
    seen: list[Tensor] = []
    handle = floats[3].register_forward_hook(lambda m, args, y: seen.append(args[0]))
    wanted = torch.cat([floats(x).detach() for x in batches()])
    handle.remove()
    x = torch.cat(seen)
    codes = (x.double() / scale).round() + zero
    weight = model[3].weight_fake_quant(floats[3].weight.detach())
    if integers:
        pyquant.convert_(model)
    report = error_report(model, floats, batches(), 3)
    assert [(r.layer, r.tensor) for r in report.rows] == [
        *((layer, tensor) for layer in "035" for tensor in ("weight", "input", "alone", "output")),
        ("", "output"),
    ]
    assert not report.skipped
    for row, a, b in (
        (report.of("3", "input"), (codes.clamp(low, high) - zero) * scale, x),
        (report.of("3", "weight"), weight, floats[3].weight.detach()),
        (report.of("3", "alone"), model[3](x).detach(), floats[3](x).detach()),
        (report.of(""), torch.cat([model(x).detach() for x in batches()]), wanted),
    ):
        assert (row.mae, row.mse, row.max_error, row.sqnr_db, row.cosine) == pytest.approx(brute(a, b), rel=1e-4)
        assert row.count == b.numel()
    clipped = float(((codes < low) | (codes > high)).double().mean())
    assert report.of("3", "input").clip_share == pytest.approx(clipped, abs=1e-12)
    assert clipped > 0.005
    assert report.of("3", "output").sqnr_db <= report.of("3", "alone").sqnr_db
    assert all(row.kl >= 0 for row in report.rows if row.tensor in ("alone", "output"))


def test_models_stay_as_they_were() -> None:
    floats = net().train()
    floats[3].eval()
    model = pyquant.quantize_(copy.deepcopy(floats), pyquant.W8A8Dynamic())
    error_report(model, floats, batches(), 2)
    assert [m.training for m in floats] == [True, True, True, False, True, True]
    assert not any(m._forward_hooks for root in (floats, model) for m in root.modules())


@pytest.mark.parametrize(
    "scheme", [pyquant.W4A8(16), pyquant.W8A16(), pyquant.W4A16(16), pyquant.W4A4Dynamic()], ids=str
)
def test_other_schemes(scheme: pyquant.QScheme) -> None:
    floats = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8))
    data = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    model = pyquant.insert_fake_quantize_(copy.deepcopy(floats), scheme)
    if scheme.is_static:
        pyquant.QuantizationCalibrator().calibrate_model(model, data, "max", 2)
    reports = [error_report(model, floats, data, 2), error_report(pyquant.convert_(model), floats, data, 2)]
    for row in reports[1].rows:
        same = reports[0].of(row.layer, row.tensor)
        assert row.sqnr_db == pytest.approx(same.sqnr_db, abs=0.05)
        assert row.sqnr_db > 8
    assert any(row.tensor == "input" for row in reports[1].rows) == (scheme.inputs is not None)


def test_what_is_left_out_is_named() -> None:
    floats = net()
    model = pyquant.fuse_(pyquant.quantize_(copy.deepcopy(floats).eval(), pyquant.W8A8Dynamic()))
    report = error_report(model, floats, batches(), 1)
    assert set(report.skipped) == {"0", "3"}
    assert "activation relu" in report.skipped["0"]
    assert "activation relu" in error_table(report)
    other = nn.Sequential(*(m for i, m in enumerate(net()) if i < 5), nn.Linear(32, 5))
    assert "weights are [5, 32]" in error_report(model, other, batches(), 1).skipped["5"]


class Rewritten(nn.Module):
    """What quantize_ rewrites: attention and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.lstm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(self.attention(x, x, x)[0])[0]
        return y


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bank = nn.Linear(8, 8), Bank(4, 8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x)
        weights, index = x[:, :4].softmax(-1).topk(1)
        return self.bank(x, index, weights)


def test_experts_that_see_other_tokens_are_not_compared_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding in front of a router sends tokens elsewhere: as many rows then are those of others."""
    monkeypatch.setattr(expert_rules, "_RULES", dict(expert_rules._RULES))
    register_banks()
    torch.manual_seed(0)
    floats = Routed().eval()
    model = pyquant.quantize_(copy.deepcopy(floats), "W4A4Dynamic", check_speed=False, on_indivisible="per_channel")
    report = error_report(model, floats, [torch.randn(40, 8) for _ in range(4)], num_batches=4)
    layers = {row.layer for row in report.rows}
    tensors = {name: {row.tensor for row in report.rows if row.layer == name} for name in layers}
    assert tensors["rows"] == {"weight", "input", "alone", "output"}
    assert tensors["bank.0.gate_up_proj"] == {"weight", "input", "alone"}
    assert "output" in tensors[""]
    assert report.skipped == {
        "bank": "its experts see other tokens in the quantised model: their 'output' is not compared"
    }


class Cut(nn.Module):
    """How many rows it gives on depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        return self.out(x[x[:, 0] > 0])


def test_results_of_other_shapes_are_told_not_compared() -> None:
    torch.manual_seed(0)
    floats = Cut().eval()
    model = pyquant.quantize_(copy.deepcopy(floats), "W4A4Dynamic", check_speed=False, on_indivisible="per_channel")
    report = error_report(model, floats, [torch.randn(400, 8)], num_batches=1)
    told = "some results have another shape in the quantised model: they are not compared"
    assert report.skipped == {"the model": told, "out": told}
    assert {row.tensor for row in report.rows if row.layer == "gate"} == {"weight", "input", "alone", "output"}


def test_layers_that_quantize_makes_of_other_classes_are_compared() -> None:
    torch.manual_seed(0)
    floats, data = Rewritten().eval(), [torch.randn(2, 5, 16)]
    want, kinds = floats(data[0]), [type(m) for m in floats.modules()]
    model = pyquant.quantize_(copy.deepcopy(floats), pyquant.W8A8Dynamic(), check_speed=False)
    report = error_report(model, floats, data, 1)
    named = {row.layer for row in report.rows if row.tensor == "weight"}
    assert named == {f"attention.{part}_proj" for part in ("q", "k", "v", "out")} | {"lstm.ih_l0", "lstm.hh_l0"}
    assert min(row.sqnr_db for row in report.rows if row.tensor == "weight") > 35
    assert [type(m) for m in floats.modules()] == kinds, "the reference is as it was"
    assert torch.equal(floats(data[0]), want)


def test_weights_that_lie_transposed_are_compared_as_they_multiply() -> None:
    """Of a square matrix no shape tells."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    floats = nn.Sequential(conv1d(32, 32), nn.Tanh(), conv1d(8, 32)).eval()
    model = pyquant.quantize_(copy.deepcopy(floats), pyquant.W8A8Dynamic(), check_speed=False)
    report = error_report(model, floats, [torch.randn(4, 32)], 1)
    assert {row.layer for row in report.rows} == {"0", "2", ""}
    assert min(row.sqnr_db for row in report.rows) > 30
    assert report.skipped == {}


def test_kl_grows_where_bits_go() -> None:
    floats, data = nn.Sequential(nn.Linear(64, 64)), [torch.randn(2048, 64)]
    kl = []
    for bits in (2, 3, 4, 8):
        scheme = pyquant.QScheme(pyquant.TensorScheme(bits, granularity="per_tensor"))
        model = pyquant.insert_fake_quantize_(copy.deepcopy(floats), scheme)
        kl.append(error_report(model, floats, data, 1).of("0", "alone").kl)
    assert sorted(kl, reverse=True) == kl
    assert kl[0] > 20 * kl[-1]


def test_files(tmp_path: Path) -> None:
    floats = net()
    report = error_report(pyquant.quantize_(copy.deepcopy(floats), pyquant.W8A8Dynamic()), floats, batches(), 1)
    rows = list(csv.DictReader(write_errors(report, tmp_path / "e.csv").read_text().splitlines()))
    assert len(rows) == len(report.rows)
    assert float(rows[0]["sqnr_db"]) == report.rows[0].sqnr_db
    assert load_record(write_errors(report, tmp_path / "e.json")) == report
    assert "| (whole model)" in write_errors(report, tmp_path / "e.md").read_text()
    with pytest.raises(ArgumentError, match=r"\.md, \.csv or \.json"):
        write_errors(report, tmp_path / "e.txt")
    assert report.worst(1)[0].sqnr_db == min(row.sqnr_db for row in report.rows if row.tensor == "alone")


def test_wrong_arguments() -> None:
    floats = net()
    model = pyquant.quantize_(copy.deepcopy(floats), pyquant.W8A8Dynamic())
    for call, match in (
        (lambda: error_report(floats, floats, batches()), "reference"),
        (lambda: error_report("model", floats, batches()), "model"),
        (lambda: error_report(copy.deepcopy(floats), floats, batches()), "no quantised layer"),
        (lambda: error_report(model, nn.Sequential(), batches()), "no float layer"),
        (lambda: error_report(model, floats, batches(), 0), "num_batches"),
    ):
        with pytest.raises(ArgumentError, match=match):
            call()
    with pytest.raises(CalibrationError, match="the data had 3"):
        error_report(model, floats, batches(), 4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_data_that_are_not_finite_are_refused(bad: float) -> None:
    """They were reported as perfect: nothing differs where nothing compares."""
    floats, data = net(), batches()
    data[1][0, 0, 0, 0] = bad
    model = pyquant.quantize_(copy.deepcopy(floats), "W8A8Dynamic", check_speed=False)
    with pytest.raises(NonFiniteError, match="batches under which input of 0 is NaN or infinite"):
        error_report(model, floats, data, num_batches=3)


def test_a_model_that_gives_infinities_is_as_wrong_as_can_be() -> None:
    floats = net()
    model = pyquant.quantize_(copy.deepcopy(floats), "W8A8Dynamic", check_speed=False)
    model[5].register_forward_hook(lambda module, args, y: torch.full_like(y, torch.inf))
    row = error_report(model, floats, batches(), num_batches=3).rows[-1]
    assert (row.sqnr_db, row.mse) == (-math.inf, math.inf)


@pytest.mark.parametrize("scheme", [pyquant.W8A16(), pyquant.W4A16(group_size=None)], ids=str)
def test_layers_whose_inputs_stay_float_were_called_too(scheme: pyquant.QScheme) -> None:
    floats = net().eval()
    report = error_report(pyquant.quantize_(copy.deepcopy(floats), scheme, check_speed=False), floats, batches(), 1)
    assert not report.skipped
    assert {row.tensor for row in report.rows if row.layer == "3"} == {"weight", "alone", "output"}


@pytest.mark.parametrize("scheme", ["W8A8", "W4A8(group_size=None)"])
@pytest.mark.parametrize("improve", ["smooth", "equalize", "gptq", "bias_correction"])
def test_factors_that_moved_between_layers_are_told_not_measured(improve: str, scheme: str) -> None:
    """A weight that was multiplied is not one that was rounded badly; one whose codes were chosen well is."""
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    with torch.no_grad():
        floats[1].weight[::7] *= 30  # channels that smoothing and equalisation are for
        floats[4].weight[:, ::5] *= 20
    data = [torch.randn(32, 64) for _ in range(4)]
    model = pyquant.quantize_(copy.deepcopy(floats), scheme, data=data, improve=[improve], check_speed=False)
    report = error_report(model, floats, data, 2)
    moved = improve in ("smooth", "equalize")
    assert bool(report.skipped) == moved
    for name, reason in report.skipped.items():
        assert "moved factors" in reason
        assert not [row for row in report.rows if row.layer == name]
    assert all(row.sqnr_db > 5 for row in report.rows if row.tensor != "weight")


@pytest.mark.parametrize("calibrator", ["max", "percentile", "mse", "entropy"])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_what_rounding_itself_makes_of_weights_is_measured(granularity: str, calibrator: str) -> None:
    """Zeros beside an outlier, clipped tails: the worst layers are what the report is for."""
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)).eval()
    with torch.no_grad():
        floats[0].weight[3, 5] = 3.0
        floats[2].weight[:, 7] *= 20
    weights = replace(
        pyquant.W4A8Dynamic(None).weights, granularity=granularity, calibrator=calibrator, percentile=99.0
    )
    scheme = replace(pyquant.W4A8Dynamic(None), weights=weights)
    model = pyquant.quantize_(copy.deepcopy(floats), scheme, check_speed=False)
    report = error_report(model, floats, [torch.randn(8, 64)], 1)
    assert not report.skipped
    assert {(row.layer, row.tensor) for row in report.rows} >= {("0", "weight"), ("2", "weight")}


def test_what_a_model_raises_over_a_batch_names_the_batch() -> None:
    floats = nn.Sequential(nn.Linear(16, 8))
    model = pyquant.quantize_(copy.deepcopy(floats), pyquant.W8A8Dynamic(), check_speed=False)
    with pytest.raises(CalibrationError, match="data: on batch 1 the model raised: mat1 and mat2"):
        error_report(model, floats, [torch.randn(4, 16), torch.randn(4, 12)], 2)


@pytest.mark.parametrize("scheme", ["W4A4(symmetric_inputs=False)", "W4A4(group_size=16, symmetric_inputs=False)"])
def test_codes_that_make_up_for_rounded_inputs_are_measured(scheme: str) -> None:
    """GPTQ's corrected targets shrink weights by some percent; the layers were left out as if they were smoothed."""
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)).eval()
    data = [torch.randn(64, 32) @ torch.randn(32, 32) / 4 for _ in range(8)]
    model = pyquant.quantize_(copy.deepcopy(floats), scheme, data=data, improve=["gptq"], check_speed=False)
    assert not error_report(model, floats, data, 4).skipped


def test_the_divergence_does_not_depend_on_the_order_of_batches() -> None:
    """The first batch set the bins: of zeros, all were one."""
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    data = [
        torch.zeros(64, 16),
        torch.randn(64, 16) * 1e-3,
        *(torch.randn(64, 16) for _ in range(3)),
        torch.ones(2, 16),
    ]
    model = pyquant.quantize_(copy.deepcopy(floats), "W4A8Dynamic(group_size=None)", check_speed=False)
    found = [
        [row.kl for row in error_report(model, floats, batches, len(data)).rows]
        for batches in (data, data[::-1], data[2:] + data[:2])
    ]
    assert found[0] == found[1] == found[2]
    assert max(kl for kl in found[0] if kl is not None) > 0.01
