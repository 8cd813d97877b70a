"""Learned ranges: gradients against float64, every granularity, positive scales, nothing silently off."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from qat_models import SCHEMES, calibrate, draw, linear, mlp, prepared, train
from torch import Tensor, nn

from pyquant import ArgumentError, QuantizationWarning, convert_, prepare_qat_, quantization_report
from pyquant.core.presets import W4A4, W4A8, W8A8, W8A8Dynamic
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import UnsupportedError
from pyquant.qat.learned import FLOOR, LearnedFakeQuantize
from pyquant.qat.prepare import range_parameters
from pyquant.simulate.fake_quantize import FakeQuantize

TENSORS = {
    "per tensor": (TensorScheme(), (6, 32)),
    "per tensor affine": (TensorScheme(bits=4, symmetric=False), (6, 32)),
    "per channel": (TensorScheme(bits=4, granularity="per_channel"), (6, 32)),
    "per group": (TensorScheme(bits=4, granularity="per_group", group_size=8), (6, 32)),
    "per group affine": (TensorScheme(bits=4, symmetric=False, granularity="per_group", group_size=8), (6, 32)),
}


def lsq(x: Tensor, scale: Tensor, zero: Tensor, scheme: TensorScheme, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by the formulas of the paper, element by element in float64."""
    qmin, qmax = scheme.code_range
    rows = x.double().reshape(scale.numel(), -1)
    g = grad.double().reshape(scale.numel(), -1)
    s, z = scale.double().reshape(-1, 1), zero.double().reshape(-1, 1)
    v = rows / s
    r = torch.round(v)
    low, high = qmin - z, qmax - z
    inside = (r >= low) & (r <= high)
    slope = torch.where(inside, r - v, torch.where(r < low, low.expand_as(r), high.expand_as(r)))
    factor = 1 / math.sqrt(rows.shape[1] * qmax)
    return (g * inside).reshape(x.shape), (g * slope).sum(1).reshape(scale.shape) * factor


def test_learned_scales_are_no_matrices_of_the_users() -> None:
    """Those of groups have two dimensions."""
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepare_qat_(model, W4A8(8), learn_amax=["*.weight"])
    assert [record.name for record in quantization_report(model)] == ["0", "2"]
    model.append(nn.Bilinear(4, 4, 4))
    assert [record.kind for record in quantization_report(model)][2:] == ["Bilinear"]


@pytest.mark.parametrize("name", TENSORS)
def test_gradients_of_weights(name: str) -> None:
    scheme, shape = TENSORS[name]
    d = draw("lsq", name)
    follows = FakeQuantize(scheme, follows=True)
    weight = nn.Parameter(d.normal(*shape))
    fake = LearnedFakeQuantize.of(follows, weight)
    with torch.no_grad():
        fake.scale.mul_(0.6)  # so that a part is clipped
    grad = d.normal(*shape)
    fake(weight).backward(grad)
    zero = torch.zeros_like(fake.scale) if fake.zero_point is None else fake.zero_point
    expected_x, expected_scale = lsq(weight.detach(), fake.scale.detach(), zero, scheme, grad)
    assert (expected_x == 0).any()
    torch.testing.assert_close(weight.grad.double(), expected_x)
    torch.testing.assert_close(fake.scale.grad.double(), expected_scale, rtol=1e-4, atol=1e-6)
    assert fake.scale.grad.shape == fake.scale.shape
    assert fake.scale.numel() == {"per_tensor": 1, "per_channel": 6, "per_group": 24}[scheme.granularity]


@pytest.mark.parametrize("shape", [(5, 32), (3, 5, 32), (32,)])
def test_gradient_scale_of_inputs_counts_one_sample(shape: tuple[int, ...]) -> None:
    d = draw("inputs", shape)
    plain = FakeQuantize(TensorScheme())
    plain.set_qparams(torch.tensor([0.011]))
    fake, x, grad = LearnedFakeQuantize.of(plain), d.normal(*shape), d.normal(*shape)
    fake(x).backward(grad)
    whole = lsq(x, fake.scale.detach(), torch.zeros(1), fake.scheme, grad)[1] * math.sqrt(x.numel() * 127)
    n = 32 if len(shape) < 3 else 5 * 32
    torch.testing.assert_close(fake.scale.grad.double(), whole / math.sqrt(n * 127), rtol=1e-4, atol=1e-7)


def test_a_wrong_slope_would_be_seen() -> None:
    scheme, shape = TENSORS["per channel"]
    x, scale, grad = draw("slope").normal(*shape), torch.full((6,), 0.1), torch.ones(shape)
    right = lsq(x, scale, torch.zeros(6), scheme, grad)[1]
    wrong = lsq(x * 1.001, scale, torch.zeros(6), scheme, grad)[1]
    assert not torch.allclose(right, wrong, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in SCHEMES if n != "W8A8Dynamic"])
def test_every_scheme_learns_and_converts(name: str) -> None:
    d = draw("learn", name)
    x, t = d.normal(8, 32), d.normal(8, 16) * 0.3
    model = prepared(mlp(name), SCHEMES[name], x, learn_amax=True)
    learned = [m for m in model.modules() if isinstance(m, LearnedFakeQuantize)]
    assert len(learned) >= 2
    before = [m.scale.detach().clone() for m in learned]
    losses = train(model, x, t, 12, lr=0.05)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(m.scale, b) for m, b in zip(learned, before, strict=True)), "a range did not learn"
    scales = [fake.qparams()[0] for fake in (model[0].weight_fake_quant, model[2].weight_fake_quant)]
    y = model(x).detach()
    convert_(model)  # no calibration
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)
    for layer, scale in zip((model[0], model[2]), scales, strict=True):
        got = layer.weight_scale.reshape(-1)[:: layer.weight_scale.numel() // scale.numel()]
        assert torch.equal(got, scale.reshape(-1))


def test_scales_stay_positive() -> None:
    model = prepared(nn.Sequential(linear(32, 24)), W8A8(), draw("pos").normal(4, 32), learn_amax=True)
    fake = model[0].weight_fake_quant
    start = fake.scale.detach().clone()
    assert torch.equal(fake.floor, start * FLOOR)
    with torch.no_grad():
        fake.scale[0], fake.scale[1] = -1.0, 0.0  # a step that was far too large
    x = draw("pos").normal(4, 32)
    y = model(x)
    assert y.isfinite().all()
    y.square().sum().backward()
    assert fake.scale.grad.isfinite().all()
    assert fake.scale.grad[:2].ne(0).all()  # the way back is open
    assert torch.equal(fake.scale.detach()[:2], start[:2] * FLOOR)  # and begins at the floor, not far below
    with torch.no_grad():
        fake.scale[2] = -1.0  # the last step before the checkpoint
    twin = prepared(nn.Sequential(linear(32, 24, "twin")), W8A8(), x, learn_amax=True)
    state = model.state_dict()
    assert (state["0.weight_fake_quant.scale"] > 0).all()
    assert set(state) == set(twin.state_dict())
    twin.load_state_dict(state)
    assert torch.equal(twin(x), model(x))
    assert torch.equal(twin[0].weight_fake_quant.floor, start * FLOOR)  # where learning started, not where it is now
    convert_(model)
    assert (model[0].weight_scale > 0).all()
    assert torch.isfinite(model(x)).all()


def test_which_ranges_learn() -> None:
    def learned(wish: object, scheme: object = None) -> set[str]:
        model = prepared(mlp(), scheme or W8A8(), learn_amax=wish)
        return {n for n, m in model.named_modules() if isinstance(m, LearnedFakeQuantize)}

    both = {"0.weight_fake_quant", "0.input_fake_quant", "2.weight_fake_quant", "2.input_fake_quant"}
    assert learned(False) == set()
    assert learned(True) == both
    assert learned(["0"]) == {"0.weight_fake_quant", "0.input_fake_quant"}
    assert learned(["*.input"]) == {"0.input_fake_quant", "2.input_fake_quant"}
    assert learned("re:.*weight") == {"0.weight_fake_quant", "2.weight_fake_quant"}
    assert learned(lambda name, layer: layer.out_features == 16) == {"2.weight_fake_quant", "2.input_fake_quant"}
    assert learned(True, W8A8Dynamic()) == {"0.weight_fake_quant", "2.weight_fake_quant"}
    for wish, scheme in ((["1"], W8A8()), (["nothing.*"], W8A8()), (["*.input"], W8A8Dynamic()), ([3], W8A8())):
        with pytest.raises(ArgumentError, match="learn_amax"):
            learned(wish, scheme)


def test_parameters_states_and_optimisers() -> None:
    x = draw("state").normal(8, 32)
    model = prepared(mlp(), W4A8(16), learn_amax=True)
    ranges = range_parameters(model)
    assert len(ranges) == 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # before the calibration, which must keep the parameters
    calibrate(model, x)
    assert all(p.requires_grad for p in ranges)
    model(x).square().mean().backward()
    optimizer.step()
    state = model.state_dict()
    assert state["0.weight_fake_quant.scale"].shape == (48, 2)
    fresh = prepared(mlp("other"), W4A8(16), learn_amax=True)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), model(x))
    largest = replace(W4A8(16), weights=replace(W4A8(16).weights, calibrator="max"))
    plain = prepared(mlp("plain"), largest)  # ranges that follow have no scale in their state
    assert "0.weight_fake_quant.scale" not in plain.state_dict()
    assert state["0.input_fake_quant.scale"].shape == plain.state_dict()["0.input_fake_quant.scale"].shape


def test_preparing_twice_keeps_what_was_learned() -> None:
    x = draw("twice").normal(8, 32)
    model = prepared(mlp(), W4A4(), x, learn_amax=["*.weight"])
    train(model, x, draw("twice").normal(8, 16), 3)
    y, scale = model(x).detach(), model[0].weight_fake_quant.scale.detach().clone()
    prepared(model, None, learn_amax=True)
    assert torch.equal(model(x).detach(), y)
    assert torch.equal(model[0].weight_fake_quant.scale, scale)
    assert isinstance(model[0].input_fake_quant, LearnedFakeQuantize)


@pytest.mark.parametrize("scheme", [W8A8(), W4A4(symmetric_inputs=False), W4A8(16)])
def test_training_resumes_bit_for_bit_from_any_checkpoint(scheme: QScheme) -> None:
    """Scales that run down to their floor included; three reloads in a row move nothing."""
    x, t = draw("resume").normal(8, 32), draw("resume target").normal(8, 4)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(linear(32, 16), nn.ReLU(), linear(16, 4, "out"))
        model = prepared(model, scheme, x, learn_amax=True)
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            # pulls the scales down, to their floors and below
            pull = sum(f.scale.sum() for f in model.modules() if isinstance(f, LearnedFakeQuantize))
            ((model(x) - t).square().mean() + 10 * pull).backward()
            optimizer.step()

    straight = fresh()
    steps(*straight, 12)
    model, optimizer = fresh()
    for count in (3, 1, 4, 4):
        steps(model, optimizer, count)
        states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer)]
        model, optimizer = fresh()
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    expected = straight[0].state_dict()
    fakes = [f for f in model.modules() if isinstance(f, LearnedFakeQuantize)]
    assert any(bool((f.positive_scale == f.floor).any()) for f in fakes)  # else the floor had no part in it
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_states_without_a_floor_and_quantisers_without_one() -> None:
    """Checkpoints of versions that did not save it, and models that simulate without learning."""
    x = draw("floors").normal(4, 32)
    model, other = (prepared(nn.Sequential(linear(32, 8, name)), W8A8(), x, learn_amax=True) for name in "ab")
    state = {name: value for name, value in model.state_dict().items() if not name.endswith(".floor")}
    other.load_state_dict(state)
    assert torch.equal(other[0].weight_fake_quant.floor, model[0].weight_fake_quant.scale.detach() * FLOOR)
    by_mse = replace(W8A8(), weights=replace(W8A8().weights, calibrator="mse"))
    plain = prepared(nn.Sequential(linear(32, 8, "c")), by_mse, x)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain[0].weight_fake_quant.scale, model[0].weight_fake_quant.scale)
    with pytest.raises(RuntimeError, match="ceiling"):
        plain.load_state_dict({**model.state_dict(), "0.weight_fake_quant.ceiling": x})


@pytest.mark.parametrize(("forward", "learn"), [("int8", False), ("simulated", True), ("int8", True)])
def test_second_derivatives_are_refused_where_they_would_be_wrong(forward: str, learn: bool) -> None:
    model = prepared(
        mlp("twice"),
        SCHEMES["W8A8"] if learn else W8A8Dynamic(),
        draw("t").normal(8, 32),
        learn_amax=learn,
        forward=forward,
    )
    x = draw("twice").normal(8, 32).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)  # as a gradient penalty begins
    with pytest.raises(UnsupportedError, match="second derivatives"):
        grad.norm().backward()
    model(x).square().sum().backward(create_graph=True)  # first ones are what they are without
    twice = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for a, p in zip(twice, model.parameters(), strict=True):
        assert torch.equal(a, p.grad)
