"""2 to 8 bits, and int16 inputs: simulated in models, trained, and refused by everything that runs in integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from qat_models import draw, mlp
from torch import Tensor, nn

import pyquant
from pyquant.calibrate import compute_range, new_statistics
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import SchemeError
from pyquant.nn.linear_buffers import check_scheme
from pyquant.simulate.fake_quantize import FakeQuantize

ALL_BITS = [2, 3, 4, 5, 6, 7, 8]


def scheme_of(bits: int, *, per: str = "per_channel", dynamic: bool = False, symmetric: bool = True) -> QScheme:
    weights = TensorScheme(bits, granularity=per, group_size=16 if per == "per_group" else None)
    return QScheme(weights, TensorScheme(bits, symmetric, "per_token" if dynamic else "per_tensor", dynamic=dynamic))


def rounded(x: Tensor, bits: int, scale: Tensor) -> Tensor:
    """The definition, in float64."""
    top = 2 ** (bits - 1) - 1
    return (x.double() * (1 / scale).double()).round().clamp(-top, top) * scale.double()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("per", ["per_tensor", "per_channel", "per_group"])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_model_computes_with_so_many_codes(bits: int, per: str, dynamic: bool) -> None:
    x = draw("bits", bits, per).normal(64, 32)
    model = pyquant.insert_fake_quantize_(mlp(), scheme_of(bits, per=per, dynamic=dynamic))
    if not dynamic:
        pyquant.QuantizationCalibrator().calibrate_model(model, [x], num_calib_batches=1, method="max")
    top, layer = 2 ** (bits - 1) - 1, model[0]
    groups = {"per_tensor": (-1,), "per_channel": (48, -1), "per_group": (48, 2, 16)}[per]
    weight = layer.weight.detach().reshape(groups)
    w = rounded(weight, bits, weight.abs().amax(-1, keepdim=True) / top).reshape(layer.weight.shape)
    amax = x.abs().amax(1, keepdim=True) if dynamic else x.abs().max()
    want = rounded(x, bits, amax / top) @ w.T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), want, rtol=1e-5, atol=1e-5)
    assert len(layer.weight_fake_quant(layer.weight)[0].unique()) <= 2 * 2 * top + 1


@pytest.mark.parametrize("method", ["max", "percentile", "entropy", "mse"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_more_bits_lose_less(method: str, symmetric: bool) -> None:
    x = draw("better").normal(256, 32)
    want = mlp()(x)
    losses = []
    for bits in ALL_BITS:
        model = pyquant.SelectiveQuantizer(scheme=scheme_of(bits, symmetric=symmetric), verbose=False)
        model = model.quantize_module(mlp())
        pyquant.QuantizationCalibrator().calibrate_model(model, [x], method=method, num_calib_batches=1)
        losses.append((model(x) - want).square().mean().item())
    assert all(a > b for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize("method", ["max", "percentile", "mse"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_int16_inputs_are_simulated(method: str, dynamic: bool) -> None:
    x = draw("int16").normal(64, 32)
    how = TensorScheme(16, granularity="per_token" if dynamic else "per_tensor", dynamic=dynamic)
    model = nn.Sequential(mlp()[0])
    pyquant.SelectiveQuantizer(
        scheme=QScheme(TensorScheme(granularity="per_channel"), how), verbose=False
    ).quantize_module(model)
    if not dynamic:
        pyquant.QuantizationCalibrator().calibrate_model(model, [x], method=method, num_calib_batches=1)
    y = model[0].input_fake_quant(x)
    step = x.abs().max() / 32767
    if method != "percentile":
        assert 0 < (y - x).abs().max() <= 0.51 * step
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad.abs().max() > 0
    assert str(how).startswith("int16")


def test_int16_does_not_learn_and_has_no_integer_forward() -> None:
    scheme = QScheme(TensorScheme(granularity="per_channel"), TensorScheme(16))
    model = pyquant.insert_fake_quantize_(mlp(), scheme)
    pyquant.QuantizationCalibrator().calibrate_model(model, [draw("i").normal(8, 32)], "max", 1)
    with pytest.raises(pyquant.ArgumentError, match="int16"):
        pyquant.prepare_qat_(model, forward="int8")
    pyquant.prepare_qat_(model, learn_amax=True)
    assert type(model[0].input_fake_quant) is FakeQuantize


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 6])
def test_they_train(bits: int, learn: bool) -> None:
    x, target = draw("train").normal(64, 32), draw("target").normal(64, 16) * 0.3
    model = pyquant.insert_fake_quantize_(mlp(), scheme_of(bits))
    pyquant.QuantizationCalibrator().calibrate_model(model, [x], "mse", 1)
    pyquant.prepare_qat_(model, learn_amax=learn)
    losses = pyquant.finetune(model, lambda m, b: (m(b) - target).square().mean(), [x], lr=0.02, steps=30)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("scheme", "field"),
    [
        (scheme_of(3), "weights.bits"),
        (QScheme(TensorScheme(granularity="per_channel"), TensorScheme(6)), "inputs.bits"),
        (QScheme(TensorScheme(granularity="per_channel"), TensorScheme(16)), "inputs.bits"),
        (QScheme(TensorScheme(granularity="per_channel"), TensorScheme(4)), "inputs.bits"),
        (QScheme(TensorScheme(granularity="per_channel"), TensorScheme(), TensorScheme(5)), "outputs.bits"),
    ],
    ids=str,
)
def test_what_runs_in_integers_refuses(scheme: QScheme, field: str) -> None:
    x = draw("refuse").normal(8, 32)
    simulated = pyquant.insert_fake_quantize_(mlp(), scheme)
    pyquant.QuantizationCalibrator().calibrate_model(simulated, [x], "max", 1)
    before = simulated(x)
    for call in (
        lambda: pyquant.QLinear.from_float(mlp()[0], scheme, input_scale=0.1, output_scale=0.1),
        lambda: pyquant.QConv2d.from_float(nn.Conv2d(3, 4, 1), scheme, input_scale=0.1, output_scale=0.1),
        lambda: pyquant.quantize_(mlp(), scheme, input_scales={"0": 0.1, "2": 0.1}),
        lambda: pyquant.convert_(simulated),
        lambda: check_scheme(scheme),
    ):
        with pytest.raises(SchemeError, match="4") as caught:
            call()
        assert field in str(caught.value)
    assert torch.equal(simulated(x), before)


def test_chains_and_calibrators_say_what_they_take() -> None:
    with pytest.raises(pyquant.ArgumentError, match="4 or 8 bits"):
        pyquant.Quantize(0.1, None, TensorScheme(3))
    statistics = new_statistics(TensorScheme(16, calibrator="entropy"))
    statistics.observe(draw("entropy").normal(1000))
    with pytest.raises(SchemeError, match="bits"):
        compute_range(statistics, TensorScheme(16, calibrator="entropy"))
