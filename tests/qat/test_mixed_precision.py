"""autocast with float32 masters, GradScaler, model.half(), torch.compile without a graph break."""

from __future__ import annotations

import copy

import pytest
import torch
from qat_models import SCHEMES, draw, linear, mlp, prepared, train
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant import convert_
from pyquant.core.presets import W4A8, W8A8, W8A8Dynamic
from pyquant.qat.learned import LearnedFakeQuantize

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("forward", ["simulated", "int8"])
def test_autocast(dtype: torch.dtype, learn: bool, forward: str) -> None:
    d = draw("autocast", dtype, learn, forward)
    x, t = d.normal(8, 32), d.normal(8, 16) * 0.3
    model = prepared(mlp(), W8A8(), x, learn_amax=learn, forward=forward)
    with torch.autocast("cpu", dtype):
        y = model(x)
        assert y.dtype == dtype
        loss = F.mse_loss(y.float(), t)
    loss.backward()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32, name
        assert p.grad is not None, name
        assert p.grad.dtype == torch.float32, name
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.mse_loss(model(x), t).backward()
    for p, low in zip(model.parameters(), grads, strict=True):
        error = (p.grad - low).norm() / (p.grad.norm() + 1e-12)
        # a learned scale's gradient is a difference of many terms: rounding to 16 bits moves it more
        assert error < (0.15 if p.dim() > 1 else 0.4)


def test_rounding_of_operands_under_autocast_and_the_exact_way() -> None:
    """bfloat16 operands round scale * code; integer products do not: what docs/qat.md 5 says."""
    d = draw("skew")
    x = d.normal(64, 32)
    floats = nn.Sequential(linear(32, 24))
    simulated, integer = (prepared(copy.deepcopy(floats), W8A8(), x, forward=f) for f in ("simulated", "int8"))
    exact = convert_(copy.deepcopy(integer))(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        skewed, direct = simulated(x).float(), integer(x)
    assert torch.equal(direct, exact.bfloat16())  # one rounding, of the result
    assert (skewed - exact).square().mean() > 1.2 * (direct.float() - exact).square().mean()


def test_scales_and_rounding_are_float32_under_autocast() -> None:
    x = draw("fp32").normal(8, 32)
    model = prepared(nn.Sequential(linear(32, 24)), W8A8(), x, learn_amax=True)
    fake = model[0].input_fake_quant
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(fake(x), prepared_twin(fake)(x))
        narrow = x.bfloat16()
        assert torch.equal(fake(narrow), prepared_twin(fake)(narrow.float()).bfloat16())  # widened, rounded once
    assert fake.scale.dtype == torch.float32


def prepared_twin(fake: LearnedFakeQuantize) -> object:
    scale = fake.scale.detach()
    return lambda x: (torch.round(x * (1 / scale)).clamp(-127, 127) * scale).to(x.dtype)


def test_grad_scaler() -> None:
    d = draw("scaler")
    x, t = d.normal(16, 32), d.normal(16, 16) * 0.3
    model = prepared(mlp(), W4A8(16), x, learn_amax=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # overflows at first, and must recover
    losses, skipped = [], 0
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), t)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(loss.item())
    assert skipped > 0
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("forward", ["simulated", "int8"])
def test_casting_a_prepared_model(dtype: torch.dtype, learn: bool, forward: str) -> None:
    """model.half() after preparation: scales stay float32 and unrounded, forward and backward run, codes are right."""
    d = draw("half", dtype, learn)
    x = d.normal(8, 32)
    model = prepared(mlp(), W8A8(), x, learn_amax=learn, forward=forward)
    scale = model[0].input_fake_quant.scale.detach().clone()
    model.to(dtype)
    assert torch.equal(model[0].input_fake_quant.scale.detach(), scale)
    assert model[0].weight.dtype == dtype
    y = model(x.to(dtype))
    assert y.dtype == dtype
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    integer = convert_(copy.deepcopy(model))
    low = x.to(dtype)
    if forward == "int8":
        assert torch.equal(integer(low), y.detach())
    else:
        torch.testing.assert_close(integer(low), y.detach(), rtol=0.05, atol=0.05)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "learn", "forward"),
    [
        ("W8A8", True, "simulated"),
        ("W8A8Dynamic", False, "simulated"),
        ("W4A8(group_size=16)", True, "simulated"),
        ("W4A8 mse weights", False, "simulated"),
        ("W4A4(symmetric_inputs=False)", True, "int8"),
        ("W8A8Dynamic", False, "int8"),
    ],
)
def test_compiles_without_a_graph_break(name: str, learn: bool, forward: str) -> None:
    d = draw("compile", name)
    x = d.normal(8, 32)
    model = prepared(nn.Sequential(linear(32, 16)), SCHEMES[name], x, learn_amax=learn, forward=forward)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def gradients(f: nn.Module, data: Tensor) -> list[Tensor]:
        data = data.clone().requires_grad_()
        y = f(data)
        return [y.detach(), *torch.autograd.grad(y.square().mean(), [data, *model.parameters()])]

    for a, b in zip(gradients(compiled, x), gradients(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    train(model, x, d.normal(8, 16), 2)  # what the compiled graph reads has changed
    assert torch.equal(compiled(x).detach(), model(x).detach())


def test_compiled_training_step_under_autocast() -> None:
    d = draw("compiled autocast")
    x, t = d.normal(8, 32), d.normal(8, 16) * 0.3
    model = prepared(nn.Sequential(linear(32, 16)), W8A8Dynamic(), learn_amax=True, forward="int8")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x).float(), t)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(x, t)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
