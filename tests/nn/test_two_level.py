"""Layers with group scales of two levels: bits, state, files, refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import accept
import pytest
import torch
from torch import nn

import pyquant
from pyquant import QLinear, TensorScheme, W4A8TwoLevel, W4A8TwoLevelDynamic, W8A8Dynamic, numerics, ops
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, SchemeError
from pyquant.nn import weights
from pyquant.ops import fallback


def _layer(k: int = 96, n: int = 40, group: int = 32, **options: bool) -> QLinear:
    torch.manual_seed(k + n)
    return QLinear.from_float(nn.Linear(k, n), W4A8TwoLevelDynamic(group, **options))


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_layer_gives_what_an_int8_layer_of_its_products_gives(rows: int, symmetric: bool) -> None:
    layer = _layer(symmetric_inputs=symmetric)
    base, step = numerics.split_scales(layer.weight_scale, 18)
    products = layer.codes * step.repeat_interleave(32, 1)
    assert int(layer.codes.abs().max()) == 7
    assert int(products.abs().max()) <= 127
    scheme = W8A8Dynamic(symmetric_inputs=symmetric)
    eight = QLinear.from_codes(products, base, scheme=scheme, bias=layer.bias)
    x = torch.randn(rows, 96)
    accept.t1(layer(x), eight(x))
    accept.t1(layer(x), layer.reference(x))


def test_real_weights_are_exact_products_of_both_levels() -> None:
    layer = _layer()
    base, step = numerics.split_scales(layer.weight_scale, 18)
    real = base.double()[:, None] * (step.repeat_interleave(32, 1).double() * layer.codes.double())
    assert torch.equal(layer.dequantised_weight(), real.float())
    assert torch.equal(layer.weight.dequantize(), real.float())
    assert torch.equal(layer.to_float().weight, real.float())


def test_the_state_is_that_of_plain_groups() -> None:
    layer = _layer()
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    assert shapes == {"weight_packed": (40, 48), "weight_scale": (40, 3), "bias": (40,)}
    again = QLinear(96, 40, scheme=layer.scheme)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(2, 96)
    accept.t1(again(x), layer(x))
    accept.t1(copy.deepcopy(layer)(x), layer(x))


def test_codes_of_another_scale_are_multiplied_too() -> None:
    layer = _layer()
    codes = torch.randint(-127, 128, (4, 96), dtype=torch.int8)
    x = pyquant.QTensor(codes, torch.tensor([0.25]), torch.tensor([3], dtype=torch.int32))
    accept.t1(layer(x), layer.reference(x))


def test_scales_that_are_no_whole_steps_are_refused_with_the_row() -> None:
    layer = _layer()
    scale = layer.weight_scale.clone()
    scale[7, 1] = scale[7, 1] * 1.01
    with pytest.raises(ArgumentError, match=r"weight_scale.*row 7: .*1 to 18 whole steps"):
        QLinear.from_codes(layer.codes, scale, scheme=layer.scheme)
    plain = QLinear.from_float(nn.Linear(96, 40), pyquant.W4A8Dynamic(32))
    with pytest.raises(RuntimeError, match="1 to 18 whole steps"):
        layer.load_state_dict(plain.state_dict())
    with pytest.raises(ArgumentError, match="weight_scale"):
        layer.weight_scale = scale


def test_a_convolution_has_two_levels_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1))
    pyquant.quantize_(model, W4A8TwoLevelDynamic(16), check_speed=False)
    x = torch.randn(2, 16, 6, 6)
    assert model[0].scheme.weights.two_level
    accept.t1(model(x), model[0].reference(x))


def test_files_give_the_layer_back_and_other_readers_see_plain_groups(tmp_path: Path) -> None:
    torch.manual_seed(1)
    make = lambda: nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))  # noqa: E731
    model = pyquant.quantize_(make(), W4A8TwoLevelDynamic(16))
    pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, make)
    assert str(again[0].scheme) == "W4A8TwoLevelDynamic(group_size=16)"
    x = torch.randn(5, 64)
    accept.t1(again(x), model(x))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    weights = [group["weights"] for group in config["config_groups"].values()]
    assert [(w["num_bits"], w["strategy"], w["group_size"]) for w in weights] == [(4, "group", 16)]
    assert any('"two_level":true' in path.read_text().replace(" ", "") for path in tmp_path.glob("*.json"))


def test_calibrated_static_inputs_and_simulation_agree() -> None:
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(8, 32)
    simulated = pyquant.insert_fake_quantize_(copy.deepcopy(model), W4A8TwoLevel(8))
    pyquant.QuantizationCalibrator().calibrate_model(simulated, [x], num_calib_batches=1)
    real = simulated[0].weight_fake_quant(simulated[0].weight).detach()
    layer = pyquant.convert_(simulated)[0]
    assert torch.equal(layer.dequantised_weight(), real)
    assert torch.equal(layer.codes, QLinear.from_float(model[0], W4A8TwoLevelDynamic(8)).codes)
    accept.t1(layer(x), layer.reference(x))


def test_training_keeps_whole_steps() -> None:
    torch.manual_seed(3)
    model = pyquant.prepare_qat_(nn.Sequential(nn.Linear(32, 16)), W4A8TwoLevelDynamic(8))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimiser.step()
    assert pyquant.convert_(model)[0].scheme.weights.two_level
    with pytest.raises(ArgumentError, match="learn_amax"):
        pyquant.prepare_qat_(nn.Sequential(nn.Linear(32, 16)), W4A8TwoLevelDynamic(8), learn_amax=["*.weight"])


GROUPS = TensorScheme(bits=4, granularity="per_group", group_size=8, two_level=True)
TOKENS = TensorScheme(granularity="per_token", dynamic=True)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: TensorScheme(bits=4, granularity="per_channel", two_level=True), "two_level"),
        (lambda: TensorScheme(bits=8, granularity="per_group", group_size=8, two_level=True), "two_level"),
        (
            lambda: TensorScheme(bits=4, symmetric=False, granularity="per_group", group_size=8, two_level=True),
            "two_level",
        ),
        (lambda: TensorScheme(bits=4, granularity="per_group", group_size=8, two_level=1), "two_level"),
        (lambda: QScheme(GROUPS), "weights.two_level"),
        (
            lambda: QScheme(GROUPS, TensorScheme(bits=4, granularity="per_token", dynamic=True)).check_kernels(),
            "inputs.bits",
        ),
        (lambda: QScheme(TensorScheme(granularity="per_channel"), GROUPS), "inputs.two_level"),
    ],
)
def test_schemes_that_mean_nothing_are_refused(make, argument: str) -> None:
    with pytest.raises(SchemeError) as caught:
        make()
    assert caught.value.argument == argument


def test_older_readers_take_every_other_scheme() -> None:
    assert "two_level" not in TensorScheme().to_dict()
    assert GROUPS.to_dict()["two_level"] is True
    assert TensorScheme.from_dict(GROUPS.to_dict()) == GROUPS


def test_full_range_and_fewer_bits_have_their_own_limits() -> None:
    full = TensorScheme(bits=4, granularity="per_group", group_size=8, two_level=True, narrow_range=False)
    layer = QLinear.from_float(nn.Linear(32, 16), QScheme(full, TOKENS))
    assert int(numerics.split_scales(layer.weight_scale, 15)[1].max()) <= 15
    x = torch.randn(3, 32)
    accept.t1(layer(x), layer.reference(x))


@pytest.mark.parametrize("layout", ["rows", "rows_blocked128"])
def test_gpus_hold_codes_and_steps(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bits a code and a byte a group: the buffer of a GPU, read by the ops in Python."""
    layer = _layer(k=192, group=64)
    monkeypatch.setattr(pyquant.ops, "layout_for", lambda device, spec=None: layout)
    spec = layer._linear_spec(torch.device("cuda"))
    fields = ops.LinearSpec.from_ints(spec)
    assert (fields.w_bits, fields.group_size, fields.two_level, fields.layout) == (4, 64, True, layout)
    state = (layer.weight_packed, layer.weight_scale)
    operands = weights.packed_operands(*state, layer.scheme.weights, 192, spec)
    packed = fallback.pack_linear(*operands, layer.bias, None, None, None, None, spec)
    unpacked = fallback.unpack_linear(packed, spec)
    back = weights.of_packed(unpacked, layer.weight_scale, layer.scheme.weights, spec)
    assert torch.equal(back, layer.weight_packed)
    x = torch.randn(5, 192)
    accept.t1(fallback.qlinear(x, packed, None, spec), layer(x))
