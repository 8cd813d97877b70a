"""QAT rounds to the codes of the deployed layer, bit for bit, through training and conversion (C21)."""

from __future__ import annotations

import copy

import pytest
import torch
from qat_models import INTEGER, SCHEMES, calibrate, draw, linear, prepared, train
from torch import Tensor, nn

from pyquant import QLinear, convert_, ops
from pyquant.core.scheme import TensorScheme
from pyquant.nn.weights import dequantise_weight
from pyquant.qat.learned import LearnedFakeQuantize
from pyquant.qat.weight import WeightFakeQuantize
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.linear import FakeQuantLinear


def deployed_input(layer: QLinear, x: Tensor) -> Tensor:
    """The inputs as the deployed layer's codes stand for them."""
    s = layer.scheme.inputs
    if s is None:
        return x
    if s.dynamic:
        q, scale, zero = ops.quantize_dynamic(x, "per_token", 0, s.symmetric, *s.code_range)
        return ops.dequantize(q, scale, zero, "per_token")
    q = ops.quantize(x, layer.input_scale, layer.input_zero_point, "per_tensor", 0, *s.code_range)
    return ops.dequantize(q, layer.input_scale, layer.input_zero_point)


@pytest.mark.parametrize("index", range(50))
def test_fifty_random_modules(index: int) -> None:
    d = draw("codes", index)
    name = d.choice(list(SCHEMES))
    scheme = SCHEMES[name]
    k, n, m = 16 * d.integer(1, 6), d.integer(1, 70), d.integer(1, 9)
    learn = d.chance(0.5)
    forward = "int8" if name in INTEGER and d.chance(0.5) else "simulated"
    x = d.normal(m, k) * 2
    model = prepared(nn.Sequential(linear(k, n, index)), scheme, learn_amax=learn, forward=forward)
    calibrate(model, x)
    train(model, x, d.normal(m, n), steps=2)
    layer = model[0]
    assert isinstance(layer, FakeQuantLinear)
    rounded = layer.weight_fake_quant(layer.weight).detach()
    rounded_input = x if layer.input_fake_quant is None else layer.input_fake_quant(x).detach()
    y = model(x).detach()
    convert_(model)
    integer = model[0]
    assert isinstance(integer, QLinear)
    weight = dequantise_weight(integer.codes, integer.weight_scale, integer.weight_zero_point, scheme.weights)
    assert torch.equal(rounded, weight), name
    assert torch.equal(rounded_input, deployed_input(integer, x)), name
    deployed = integer(x)
    if forward == "int8":
        assert torch.equal(y, deployed), name
    else:
        bound = 1e-5 * (rounded_input.abs() @ weight.abs().t() + 1)
        assert ((y - deployed).abs() <= bound).all(), name


@pytest.mark.parametrize("scheme", [TensorScheme(), TensorScheme(symmetric=False), TensorScheme(bits=4)], ids=str)
def test_a_million_values(scheme: TensorScheme) -> None:
    d = draw("million", str(scheme))
    qmin, qmax = scheme.code_range
    scale, zero = torch.tensor([0.37e-1]), None if scheme.symmetric else torch.tensor([-17], dtype=torch.int32)
    half = (torch.arange(qmin - 40, qmax + 40) + 0.5) * scale  # ties, and their neighbours
    edges = torch.cat([half, torch.nextafter(half, torch.tensor(9e9)), torch.nextafter(half, torch.tensor(-9e9))])
    x = torch.cat([edges, d.normal(1_000_000 - edges.numel()) * scale * qmax * 0.7])
    codes = ops.quantize(x, scale, zero, "per_tensor", 0, qmin, qmax)
    expected = ops.dequantize(codes, scale, zero)
    plain = FakeQuantize(scheme)
    plain.set_qparams(scale, zero)
    with torch.no_grad():
        kept = WeightFakeQuantize.of(plain)
        learned = LearnedFakeQuantize.of(plain)
        assert torch.equal(plain(x), expected)
        assert torch.equal(kept(x), expected)
        assert torch.equal(learned(x), expected)
    offset = 0 if zero is None else int(zero)
    assert torch.equal(torch.round(learned(x).detach().double() / scale.double()).int() + offset, codes.int())


@pytest.mark.parametrize("name", SCHEMES)
def test_prepare_then_convert_changes_nothing(name: str) -> None:
    scheme = SCHEMES[name]
    d = draw("nothing", name)
    x, floats = d.normal(6, 32), nn.Sequential(linear(32, 24, name))
    from_qat = prepared(copy.deepcopy(floats), scheme, x)
    scales = {n: fake.qparams()[0] for n, fake in from_qat[0].fake_quantizers().items() if not fake.follows}
    convert_(from_qat)
    given = {} if "input" not in scales else {"input_scale": scales["input"]}
    if scheme.inputs is not None and not scheme.inputs.symmetric and not scheme.inputs.dynamic:
        given["input_zero_point"] = from_qat[0].input_zero_point
    if scheme.weights.calibrator == "max":
        direct = QLinear.from_float(floats[0], scheme, **given)
        assert torch.equal(direct.codes, from_qat[0].codes)
        assert torch.equal(direct.weight_scale, from_qat[0].weight_scale)
        assert torch.equal(direct(x), from_qat(x))
    assert not any(isinstance(m, FakeQuantize) for m in from_qat.modules())
