"""HadamardLinear: the function of the Linear it was made of, through every way in and out."""

from __future__ import annotations

import copy
import types
from pathlib import Path

import accept
import pytest
import torch
from torch import nn

import pyquant
from pyquant import HadamardLinear, QLinear, QTensor, W4A4Dynamic, W8A8Dynamic, numerics
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import load_checkpoint, save_checkpoint
from pyquant.nn.reordered import Reordered
from pyquant.numerics.hadamard import hadamard_transform


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 5))


def wrapped() -> nn.Sequential:
    model = build()
    model[2] = HadamardLinear.from_linear(model[2], 24)
    return model.eval()


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("block", [None, 1, 16, 24, 12])
def test_it_is_the_function_of_the_linear(block) -> None:
    linear = build()[2].double()
    layer, x = HadamardLinear.from_linear(linear, block), torch.randn(2, 3, 48).double()
    assert layer.block == (48 if block is None else block)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight, linear.weight.detach(), rtol=1e-12, atol=1e-12)
    assert layer.bias is linear.bias


def test_quantised_it_multiplies_the_codes_of_transformed_inputs() -> None:
    model = pyquant.quantize_(wrapped(), {"2.linear": W4A4Dynamic(group_size=24)})
    layer, hidden = model[2], model[:2](X)
    accept.t1(layer(hidden), layer.linear.reference(hadamard_transform(hidden, 24, layer.scale)))
    residual = torch.randn(6, 5)
    accept.t1(layer(hidden, residual), layer.linear(hadamard_transform(hidden, 24, layer.scale), residual))
    accept.t1(copy.deepcopy(layer)(hidden), layer(hidden))
    half = layer(hidden.half(), residual.half())
    inputs = layer.linear.scheme.inputs
    codes, scale, zeros = numerics.hadamard_quantize(
        hidden.half(), 24, inputs.symmetric, *inputs.code_range, layer.scale
    )
    tokens = QTensor(codes, scale, None if inputs.symmetric else zeros)
    accept.t1(half, layer.linear(tokens, residual.half()).half())
    with torch.no_grad():
        accept.t1(layer(hidden.half(), residual.half()), half.detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(hidden).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "scheme", [W8A8Dynamic(), pyquant.W4A8Dynamic(24), pyquant.W8A8(), pyquant.W4A16(24), pyquant.FP16()]
)
def test_whichever_kernel_transforms_the_function_is_one(scheme) -> None:
    """One kernel with the quantiser, one before the layer, or PyTorch's operations where derivatives are asked for."""
    model = wrapped()
    if scheme.is_static:
        pyquant.quantize_(model, {"2.linear": scheme}, data=[X], num_batches=1)
    else:
        pyquant.quantize_(model, {"2.linear": scheme})
    layer, hidden = model[2], model[:2](X).detach()
    want = layer.linear(numerics.hadamard_transform(hidden, 24, layer.scale))
    if scheme.is_float:  # torch's product: its order of sums follows the shape
        torch.testing.assert_close(layer(hidden), want)
        return
    accept.t1(layer(hidden), want)
    leaf = hidden.clone().requires_grad_()
    accept.t1(layer(leaf).detach(), want)
    (gradient,) = torch.autograd.grad(layer(leaf).sum(), leaf)
    torch.testing.assert_close(gradient, layer.weight.sum(0).expand(6, 48), rtol=0.05, atol=0.02)
    accept.t1(layer(hidden[0]), want[0])
    accept.t1(torch.vmap(layer)(hidden.reshape(2, 3, 48)).reshape(6, 5), want)
    accept.t1(layer(hidden.t().contiguous().t()), want)
    seen = []
    layer.linear.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    accept.t1(layer(hidden), want)
    accept.t1(seen[0], numerics.hadamard_transform(hidden, 24, layer.scale))


def test_an_orthogonal_map_is_saved_as_one(tmp_path: Path) -> None:
    """A scale of None: 1 / sqrt(24), which is no power of two; files of it name the block alone."""
    model = build()
    inner = nn.Linear(48, 5)
    inner.weight.data, inner.bias = hadamard_transform(model[2].weight.detach(), 24), model[2].bias
    model[2] = HadamardLinear(inner, 24)
    torch.testing.assert_close(model(X), build()(X))
    torch.testing.assert_close(model[2].weight, build()[2].weight)
    pyquant.quantize_(model.eval(), W8A8Dynamic())
    with pytest.warns(pyquant.QuantizationWarning, match="transforms its inputs"):
        pyquant.save_pretrained(model, tmp_path)
    assert load_checkpoint(tmp_path).extra["pyquant_modules"]["hadamard"] == {"2": 24}
    again = pyquant.load_pretrained(tmp_path, build)
    assert again[2].scale is None
    accept.t1(again.eval()(X), model(X))


def test_outliers_cost_less() -> None:
    """Three of 48 channels eight times as large: 4-bit tokens lose less after the transform."""
    torch.manual_seed(1)
    linear, x = nn.Linear(48, 64), torch.randn(100, 48)
    x[:, [3, 17, 40]] *= 8
    want, scheme = linear(x).detach(), W4A4Dynamic(group_size=None)
    plain, layer = nn.Sequential(linear), nn.Sequential(HadamardLinear.from_linear(linear))
    errors = [float((pyquant.quantize_(m, scheme)(x) - want).norm().detach()) for m in (layer, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_it_is_simulated_trained_and_converted_as_it_runs() -> None:
    model = pyquant.prepare_qat_(wrapped(), pyquant.W4A4(), learn_amax=False)
    pyquant.simulate.calibrate.calibrate_(model, [X], 1)
    pyquant.gptq_(model, [X, X + 1], 2)
    loss = model.train()(X).square().mean()
    loss.backward()
    assert bool(model[0].weight.grad.any())
    simulated = model.eval()(X)
    torch.testing.assert_close(pyquant.convert_(model)(X), simulated, rtol=1e-4, atol=1e-5)
    assert isinstance(model[2].linear, QLinear)


def test_dequantize_gives_a_float_model() -> None:
    model = pyquant.quantize_(wrapped(), W8A8Dynamic())
    want = model[2].weight
    pyquant.dequantize_(model)
    assert type(model[2]) is nn.Linear
    assert set(model.state_dict()) == set(build().state_dict())
    torch.testing.assert_close(model[2].weight, want)
    torch.testing.assert_close(model(X), build()(X), rtol=0.05, atol=0.05)


def test_dequantize_takes_the_transform_out_of_a_float_model_too() -> None:
    model = wrapped()
    want = model(X)
    pyquant.dequantize_(model)
    assert type(model[2]) is nn.Linear
    assert set(model.state_dict()) == set(build().state_dict())
    torch.testing.assert_close(model(X), want)
    half = pyquant.quantize_(wrapped(), {"0": W8A8Dynamic()})
    assert [type(m).__name__ for m in pyquant.dequantize_(half)] == ["Linear", "GELU", "Linear"]


@pytest.mark.parametrize("kind", ["float", "sorted"])
def test_other_savers_are_refused_as_their_file_would_lack_the_transform(kind: str) -> None:
    model = wrapped() if kind == "float" else nn.Sequential(Reordered(nn.Linear(4, 4), torch.tensor([1, 0, 3, 2])))
    module = types.ModuleType("transformers.modeling_utils")
    exec("def save_pretrained(m): return m.state_dict()", module.__dict__)
    with pytest.raises(pyquant.UnsupportedError, match=r"without what is done to its inputs.*pyquant\.save_pretrained"):
        module.save_pretrained(model)
    assert model.state_dict()
    module.save_pretrained(pyquant.dequantize_(model))


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model = pyquant.quantize_(wrapped(), W8A8Dynamic())
    with pytest.warns(pyquant.QuantizationWarning, match="transforms its inputs"):
        pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, build)
    accept.t1(again.eval()(X), model(X))
    pyquant.load_pretrained(tmp_path, again)
    accept.t1(again(X), model(X))
    other = build()
    other[2] = HadamardLinear.from_linear(other[2])
    with pytest.raises(CheckpointError, match=r"of 24, scale 0\.25; the model has blocks of 48, scale 0\.125"):
        pyquant.load_pretrained(tmp_path, other)
    with pytest.raises(CheckpointError, match=r"'2' was saved as a Linear; the model has a ReLU there"):
        pyquant.load_pretrained(tmp_path, nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.ReLU()))


@pytest.mark.parametrize(
    "forged",
    [
        {"2": 18},
        {"2": 10**12},
        {"2": 0},
        {"2": "24"},
        {"": 24},
        ["2"],
        {"2": True},
        {"2": [24, 0]},
        {"2": [24, "x"]},
        {"2": [24, 1, 1]},
        {"2": [True, 1]},
    ],
)
def test_a_forged_block_is_refused(tmp_path: Path, forged) -> None:
    with pytest.warns(pyquant.QuantizationWarning):
        pyquant.save_pretrained(pyquant.quantize_(wrapped(), W8A8Dynamic()), tmp_path)
    found = load_checkpoint(tmp_path)
    own = found.extra["pyquant_modules"] | {"hadamard": forged}
    save_checkpoint(tmp_path, found.layers, found.tensors, extra={**found.extra, "pyquant_modules": own})
    net = build()
    with pytest.raises(CheckpointError, match="hadamard"):
        pyquant.load_pretrained(tmp_path, net)
    assert type(net[2]) is nn.Linear


def test_it_compiles_and_traces() -> None:
    model = pyquant.quantize_(wrapped(), W8A8Dynamic())
    accept.t1(torch.fx.symbolic_trace(model)(X), model(X))
    accept.t1(torch.compile(model, backend="eager")(X), model(X))
    assert model(X[:0]).shape == (0, 5)


def test_wrong_arguments() -> None:
    for block in (5, 0, -2, 6, 32, True, "8", None):
        with pytest.raises(ArgumentError, match=r"'block'.*divides the 48 inputs"):
            HadamardLinear(nn.Linear(48, 2), block)  # type: ignore[arg-type]
    for scale in (0.0, -1.0, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ArgumentError, match=r"'scale'.*from 2\^-126"):
            HadamardLinear(nn.Linear(48, 2), 24, scale)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'linear'"):
        HadamardLinear.from_linear(nn.ReLU())  # type: ignore[arg-type]
    for x in (torch.ones(2, 47), torch.ones(2, 48, dtype=torch.int8), None):
        with pytest.raises(ArgumentError, match=r"'x'.*\[\.\.\., 48\]"):
            wrapped()[2](x)
