"""forward='int8': the deployed integers in training, gradients of the simulation, or a refusal."""

from __future__ import annotations

import copy

import pytest
import torch
from qat_models import INTEGER, SCHEMES, draw, linear, mlp, prepared, train
from torch import Tensor, nn

from pyquant import ArgumentError, convert_, numerics
from pyquant.core.presets import W4A16, W8A8, W4A8Dynamic, W4A8TwoLevelDynamic, W8A8Dynamic
from pyquant.qat.integer import IntegerForwardLinear


def pair(name: str, learn: bool, x: Tensor) -> tuple[nn.Module, nn.Module]:
    floats = nn.Sequential(linear(32, 24, name))
    return tuple(
        prepared(copy.deepcopy(floats), SCHEMES[name], x, learn_amax=learn, forward=forward)
        for forward in ("int8", "simulated")
    )  # type: ignore[return-value]


@pytest.mark.parametrize("shape", [(7, 32), (1, 32), (2, 3, 32), (32,), (0, 32)])
@pytest.mark.parametrize("name", INTEGER)
def test_the_integer_definition_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    d = draw("definition", name, shape)
    x = d.normal(*shape)
    integer, _ = pair(name, False, d.normal(7, 32))
    y = integer(x.requires_grad_()).detach()
    layer = convert_(copy.deepcopy(integer))[0]
    s = layer.scheme.inputs
    expected = numerics.qlinear_reference(
        x.detach(),
        layer.codes,
        layer.weight_scale,
        bias=layer.bias,
        x_scale=layer.input_scale,
        x_zero_point=layer.input_zero_point,
        x_qmin=s.code_range[0],
        x_qmax=s.code_range[1],
        x_symmetric=s.symmetric,
    )
    assert torch.equal(y, expected)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("name", INTEGER)
def test_the_function_and_gradients_of_the_simulation(name: str, learn: bool) -> None:
    d = draw("gradients", name, learn)
    x, grad = d.normal(9, 32), d.normal(9, 24)
    models = pair(name, learn, x)
    results = []
    for model in models:
        data = (1.5 * x).requires_grad_()  # beyond the calibrated range
        y = model(data)
        y.backward(grad)
        results.append([y.detach(), data.grad, *(p.grad for p in model.parameters())])
    names = ["y", "x", *(n for n, _ in models[0].named_parameters())]
    for what, integer, simulated in zip(names, *results, strict=True):
        scale = simulated.abs().max() + 1e-6
        assert ((integer - simulated).abs() <= 2e-5 * scale).all(), what
    static = SCHEMES[name].inputs is not None and not SCHEMES[name].inputs.dynamic
    assert bool((results[0][1] == 0).any()) == static  # the clip mask is at work


def test_saved_operands_are_codes() -> None:
    d = draw("saved")
    x = d.normal(64, 32).requires_grad_()
    model = prepared(nn.Sequential(linear(32, 24)), W8A8(), x.detach(), forward="int8")
    sizes: list[tuple[torch.dtype, int]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append((t.dtype, t.numel())) or t, lambda t: t):
        model(x)
    floats = sum(n for dtype, n in sizes if dtype.is_floating_point)
    assert floats <= 24 + 1  # scales only
    assert (torch.int8, 64 * 32) in sizes
    assert (torch.uint8, 64 * 32 // 8) in sizes


def test_two_level_weights_are_refused_for_their_steps() -> None:
    """Their sum is one of integers, so the words of float group scales would be wrong."""
    with pytest.raises(ArgumentError, match=r"steps that change along in_features \(group_size=16\)") as caught:
        prepared(mlp(), W4A8TwoLevelDynamic(16), forward="int8")
    assert "no integer sum" not in str(caught.value)


@pytest.mark.parametrize("scheme", [W4A8Dynamic(16), W4A16(16), W4A16(None)], ids=str)
def test_refused_where_it_is_another_function(scheme: object) -> None:
    model = mlp()
    before = dict(model.named_modules())
    with pytest.raises(ArgumentError, match=r"'int8' for '0'") as caught:
        prepared(model, scheme, forward="int8")
    assert "group_size=16" in str(caught.value) or "weight-only" in str(caught.value)
    assert dict(model.named_modules()) == before  # nothing was replaced
    mixed = prepared(model, {"0": scheme, "2": W8A8Dynamic()}, forward=lambda n, _: "int8" if n == "2" else "simulated")
    assert isinstance(mixed[2], IntegerForwardLinear)
    assert not isinstance(mixed[0], IntegerForwardLinear)


def test_wrong_words() -> None:
    with pytest.raises(ArgumentError, match="forward"):
        prepared(mlp(), W8A8Dynamic(), forward="int4")


@pytest.mark.parametrize("name", ["W8A8", "W8A8Dynamic", "W4A4(symmetric_inputs=False)"])
def test_training_goes_where_the_simulation_goes(name: str) -> None:
    d = draw("where", name)
    x, t = d.normal(16, 32), d.normal(16, 16) * 0.3
    integer = prepared(mlp(), SCHEMES[name], x, forward="int8")
    simulated = prepared(mlp(), SCHEMES[name], x)
    a, b = train(integer, x, t, 15, lr=0.02), train(simulated, x, t, 15, lr=0.02)
    assert a[-1] < 0.9 * a[0]
    torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0.05, atol=1e-3)


def test_weight_codes_are_made_once_per_change() -> None:
    model = prepared(nn.Sequential(linear(32, 24)), W8A8Dynamic(), forward="int8")
    x = draw("once").normal(4, 32)
    for _ in range(3):
        (model(x) + model(x)).sum().backward()
    assert model[0]._kept.made == 1
    with torch.no_grad():
        model[0].weight.mul_(2)
    y = model(x).detach()
    assert model[0]._kept.made == 2
    assert torch.equal(convert_(copy.deepcopy(model))(x), y)
