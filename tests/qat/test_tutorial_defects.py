"""What the QAT code of the tutorials gets wrong, as tests (the rest: tests of PTQ and calibration)."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from qat_models import calibrate, draw, linear, mlp, prepared, static_weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import pyquant
from pyquant import QATRecipeModification, QLinear, convert_, prepare_qat_
from pyquant.core.presets import W4A4, W4A8, W8A8, W8A8Dynamic
from pyquant.core.scheme import TensorScheme
from pyquant.qat.learned import LearnedFakeQuantize
from pyquant.qat.weight import WeightFakeQuantize
from pyquant.simulate.fake_quantize import FakeQuantize


def data(n: int = 64) -> tuple[Tensor, Tensor]:
    d = draw("tutorial")
    return d.normal(n, 32), d.normal(n, 16) * 0.3


def test_preparation_simulates_and_does_not_merely_observe() -> None:
    """prepare() and prepare_qat() with the qconfig of PTQ insert observers: training never sees a rounded number."""
    x, _ = data()
    model = prepared(mlp(), W4A4(), x)
    inputs, weights = model[0].input_fake_quant(x), model[0].weight_fake_quant(model[0].weight)
    assert inputs.unique().numel() <= 15
    assert all(row.unique().numel() <= 15 for row in weights)
    assert not torch.equal(model(x), mlp()(x))
    # the loss of training is that of the deployed model, not of the float one
    deployed = convert_(copy.deepcopy(model))(x)
    torch.testing.assert_close(model(x).detach(), deployed, rtol=1e-4, atol=1e-5)


def test_training_feels_the_rounding() -> None:
    x, t = data()
    model, floats = prepared(mlp(), W4A4(), x), mlp()
    for m in (model, floats):
        F.mse_loss(m(x), t).backward()
    assert not torch.allclose(model[2].weight.grad, floats[2].weight.grad, rtol=0.02)


def test_the_public_names_exist() -> None:
    """`from torch.quantization import quantization_aware_train` raises ImportError."""
    for name in ("prepare_qat_", "convert_", "finetune", "QATRecipeModificationCallback", "QATMonitor"):
        assert name in pyquant.__all__
        assert callable(getattr(pyquant, name))


def test_the_loop_of_the_tutorial_with_adam_and_clipping() -> None:
    x, t = data()
    model = prepared(mlp(), W8A8(), x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), t)
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    convert_(model)


def test_half_after_preparation_and_the_better_way() -> None:
    """There model.half() fails with a dtype error in the first step. Here it runs; float32 masters are the advice."""
    x, t = data()
    model = prepared(mlp(), W8A8(), x)
    model.half()
    F.mse_loss(model(x.half()).float(), t).backward()
    assert model[0].weight.grad.dtype == torch.float16
    masters = prepared(mlp(), W8A8(), x)
    losses = pyquant.finetune(
        masters, lambda m, b: F.mse_loss(m(b[0]).float(), b[1]), [(x, t)], lr=0.05, steps=15, autocast=torch.float16
    )
    assert losses[-1] < losses[0]
    assert masters[0].weight.dtype == torch.float32


def test_a_converted_model_takes_floats_without_stubs() -> None:
    """There the converted model wants QuantStub and DeQuantStub, or fails in quantized::linear."""
    x, _ = data()
    model = convert_(prepared(mlp(), W8A8(), x))
    assert isinstance(model[0], QLinear)
    assert model(x).dtype == torch.float32
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    twin = convert_(prepared(mlp("other"), W8A8(), x))
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(twin(x), model(x))


def test_no_calibration_after_training() -> None:
    x, t = data()
    model = prepared(mlp(), W8A8(), x, learn_amax=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), t).backward()
        optimizer.step()
    scale = model[0].input_fake_quant.qparams()[0].clone()
    convert_(model)
    assert torch.equal(model[0].input_scale.reshape(-1), scale.reshape(-1))


@pytest.mark.parametrize("scheme", [W8A8(), W4A8(16), W4A8(None)], ids=str)
def test_learned_ranges_are_not_silently_off_per_channel(scheme: object) -> None:
    x, t = data()
    model = prepared(mlp(), scheme, x, learn_amax=True)
    fake = model[0].weight_fake_quant
    assert isinstance(fake, LearnedFakeQuantize)
    assert fake.scale.numel() >= 48
    F.mse_loss(model(x), t).backward()
    assert (fake.scale.grad != 0).float().mean() > 0.9


def test_the_recipe_keeps_its_gpus() -> None:
    cfg = {
        "training_hyperparams": {"max_epochs": 10, "initial_lr": 0.1, "optimizer_params": {"weight_decay": 0.0}},
        "multi_gpu": "DDP",
        "num_gpus": 8,
    }
    new = QATRecipeModification()(cfg)
    assert (new["multi_gpu"], new["num_gpus"]) == ("DDP", 8)


@pytest.mark.parametrize("value", [0.0, 1.5, -2.0])
@pytest.mark.parametrize("learn", [False, True])
def test_constant_and_one_sided_weights(value: float, learn: bool) -> None:
    """There a constant tensor divides by zero, and ranges without 0 overflow their codes."""
    layer = linear(32, 16)
    with torch.no_grad():
        layer.weight.fill_(value)
        layer.weight[1] = -layer.weight[1].abs() - 0.1
    for scheme in (W8A8Dynamic(), pyquant.W4A16(16, symmetric=False)):
        model = prepared(nn.Sequential(copy.deepcopy(layer)), scheme, learn_amax=learn)
        x = draw("constant").normal(4, 32)
        y = model(x)
        y.sum().backward()
        assert y.isfinite().all()
        assert model[0].weight.grad.isfinite().all()
        rounded = model[0].weight_fake_quant(model[0].weight)
        assert (rounded - model[0].weight).abs().max() <= model[0].weight.abs().max() * 0.04 + 1e-6
        convert_(model)
        torch.testing.assert_close(model(x), y.detach(), rtol=1e-4, atol=1e-4)


def test_unsigned_codes_do_not_wrap() -> None:
    """There 8-bit codes from 0 to 255 are cast to int8 and 45 % of them change their sign."""
    x = draw("unsigned").uniform(64, 32) * 3  # after a ReLU
    model = prepared(nn.Sequential(linear(32, 16)), W8A8(symmetric_inputs=False))
    calibrate(model, x, share=1.0)
    rounded = model[0].input_fake_quant(x)
    assert (rounded - x).abs().max() <= x.max() / 255
    assert rounded.unique().numel() > 200  # all of the codes, not half of them


def test_the_gradient_stops_where_the_range_clips() -> None:
    x = torch.tensor([[0.1, 5.0, -5.0, 0.3]])
    for make in (lambda f: f, WeightFakeQuantize.of, LearnedFakeQuantize.of):
        plain = FakeQuantize(TensorScheme())
        plain.set_qparams(torch.tensor([1 / 127]))
        data = x.clone().requires_grad_()
        make(plain)(data).sum().backward()
        assert data.grad.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_an_uncalibrated_model_is_not_trained_in_silence() -> None:
    with pytest.warns(pyquant.QATWarning, match="calibrate first"):
        model = prepare_qat_(mlp(), W4A4())
    with pytest.raises(pyquant.ArgumentError, match="not calibrated"):
        model(data()[0])
    with pytest.raises(pyquant.ArgumentError, match="calibrat"):
        convert_(model)


def test_weights_with_a_calibrated_range_can_clip_and_recover() -> None:
    x, t = data()
    model = prepared(mlp(), static_weights(W4A8(None)), x)
    with torch.no_grad():
        model[0].weight[:, 0] = 9.0  # far beyond the range that was calibrated
    F.mse_loss(model(x), t).backward()
    assert (model[0].weight.grad[:, 0] == 0).all()
