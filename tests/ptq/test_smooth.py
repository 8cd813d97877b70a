"""smooth_: the float function stays, the factors are those of the paper, wrong pairs are found out and undone."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from float_models import randomise, tiny
from torch import Tensor, nn

import pyquant
from pyquant import ArgumentError, W8A8Dynamic
from pyquant.ptq.improve.smooth import smooth_
from pyquant.ptq.improve.smooth_rules import register_smoothing
from pyquant.simulate.insert import insert_fake_quantize_

has_transformers = importlib.util.find_spec("transformers") is not None


def encoder(norm_first: bool, activation: str = "relu") -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, activation, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("model", "shape", "producers"),
    [
        (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), (20, 8), ["0"]),
        (nn.Sequential(nn.RMSNorm(8), nn.Dropout(0.5), nn.Linear(8, 4)), (20, 8), ["0"]),
        (nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6), nn.GELU(), nn.Linear(6, 2)), (20, 8), ["0"]),
        (nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2)), (3, 5, 8), ["0", "1"]),
        (encoder(True), (3, 5, 16), [f"layers.{i}.{p}" for i in (0, 1) for p in ("norm2", "linear1")]),
        (encoder(True, "gelu"), (3, 5, 16), ["layers.0.norm2", "layers.1.norm2"]),
        (encoder(False), (3, 5, 16), ["layers.0.linear1", "layers.1.linear1"]),
    ],
)
@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_the_float_function_stays(model, shape, producers, alpha) -> None:
    model = randomise(copy.deepcopy(model))
    g = torch.Generator().manual_seed(5)
    batches = [torch.randn(*shape, generator=g) * torch.linspace(0.1, 9, shape[-1]) for _ in range(3)]
    before, want = copy.deepcopy(model.state_dict()), model(batches[2])
    found = smooth_(model, iter(batches), 2, alpha)
    assert list(found) == producers
    assert min(found.values()) > 1.2
    torch.testing.assert_close(model(batches[2]), want, rtol=1e-4, atol=1e-5)
    assert all(not torch.equal(before[f"{p}.weight"], model.get_parameter(f"{p}.weight")) for p in producers)


def test_the_factors_are_the_papers() -> None:
    norm, fc1, fc2 = nn.LayerNorm(3), nn.Linear(3, 2), nn.Linear(3, 4)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc1, self.fc2 = norm, fc1, fc2

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc1(self.norm(x)), self.fc2(self.norm(x))

    model = randomise(Pair())
    batches = [torch.randn(6, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    x = norm(torch.cat(batches)).detach().abs().amax(0)
    w = torch.cat([fc1.weight, fc2.weight]).detach().abs().amax(0)
    old = [t.detach().clone() for t in (norm.weight, norm.bias, fc1.weight, fc2.weight)]
    factor = x**0.7 / w**0.3
    found = smooth_(model, batches, 2, 0.7, pairs=[("norm", ["fc1", "fc2"])])
    for new, want in zip(
        (norm.weight, norm.bias, fc1.weight, fc2.weight),
        (old[0] / factor, old[1] / factor, old[2] * factor, old[3] * factor),
    ):
        torch.testing.assert_close(new.detach(), want, rtol=1e-6, atol=1e-7)
    assert found["norm"] == pytest.approx(float(factor.max() / factor.min()))


@pytest.mark.parametrize("scheme", ["W8A8", "W8A8Dynamic", "W4A4(symmetric_inputs=False)"])
@pytest.mark.parametrize("kind", ["unread", "unseen"])
def test_channels_that_nobody_uses_do_not_set_the_scales_of_others(kind: str, scheme: str) -> None:
    """Left at a factor of 1 beside channels that are divided by 5, or multiplied by 1000, they would."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
    batches, x = [torch.randn(64, 64) for _ in range(8)], torch.randn(500, 64)
    with torch.no_grad():
        if kind == "unread":
            model[1].weight[:, :6] = 0
            model[0].weight[:3] = 40.0
        else:
            model[1].bias[:9] = -1e3  # never active
            model[1].weight *= 1e-3
            model[1].bias[9:] *= 1e-3
            model[3].weight *= 1e3
        want = model(x)

        def decibels(smoothed: bool) -> float:
            made = copy.deepcopy(model)
            if smoothed:
                smooth_(made, batches, 8)
                assert all(bool(p.isfinite().all()) for p in made.parameters())
                assert torch.allclose(made(x), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
            got = pyquant.quantize_(made, scheme, data=None if "Dynamic" in scheme else batches, check_speed=False)(x)
            return float(10 * torch.log10(want.square().sum() / (got - want).square().sum()))

        assert decibels(True) > decibels(False) - 0.7


def test_channels_without_a_use_take_finite_factors() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, -1  # always off
        model[2].weight[:, 2] = 0
    x = torch.rand(9, 2)
    want = model(x).detach()
    smooth_(model, [x], 1)
    assert torch.allclose(model(x).detach(), want)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(-1.0)
    before = copy.deepcopy(model.state_dict())
    smooth_(model, [x], 1)  # no channel is used
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


class Residual(nn.Module):
    """A post-norm block: the norm also feeds the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.fc(x)


class Branch(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x))


def test_a_wrong_pair_is_found_out_and_undone() -> None:
    model = randomise(Residual())
    before = copy.deepcopy(model.state_dict())
    batches = [torch.randn(10, 8) * torch.linspace(0.1, 5, 8)]
    with pytest.raises(ArgumentError, match=r"moved by.*undone: norm"):
        smooth_(model, batches, 1, pairs=[("norm", ["fc"])])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    with pytest.raises(ArgumentError, match="no rule finds a pair"):
        smooth_(model, batches, 1)


def test_registered_classes() -> None:
    register_smoothing(Branch, "norm", ["fc"])
    register_smoothing(Branch, "norm", ["fc"])
    model = nn.Sequential(Branch(), Branch())
    x = torch.randn(10, 8)
    want = randomise(model)(x)
    assert list(smooth_(model, [x], 1)) == ["0.norm", "1.norm"]
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="not registered yet"):
        register_smoothing(Branch, "norm", ["other"])
    with pytest.raises(ArgumentError, match="attribute"):
        register_smoothing(Branch, "norm!", ["fc"])
    broken = Branch()
    del broken.fc
    with pytest.raises(ArgumentError, match="without 'fc'"):
        smooth_(broken, [x], 1)


def test_outliers_cost_less_after_it() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())
    with torch.no_grad():  # three channels fifty times as large, and columns as much smaller: the same function
        model[0].weight[[3, 17, 40]] *= 50
        model[1].weight[:, [3, 17, 40]] /= 50
    batches = [torch.randn(50, 64) for _ in range(3)]
    x = torch.randn(200, 64)
    want = model(x)

    def error(m: nn.Module) -> float:
        return float((insert_fake_quantize_(copy.deepcopy(m), W8A8Dynamic())(x) - want).norm() / want.norm())

    naive = error(model)
    smooth_(model, batches, 3)
    assert error(model) < naive / 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_types(dtype) -> None:
    model = randomise(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype))
    smooth_(model, [torch.randn(30, 8).to(dtype)], 1)
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.skipif(not has_transformers, reason="transformers is a demo extra and not installed")
@pytest.mark.parametrize(
    ("family", "pairs"),
    [
        ("bert", 1),
        ("llama", 4),
        ("llama_gqa", 3),
        ("mistral", 4),
        ("qwen2", 4),
        ("qwen3", 4),
    ],
)
def test_models_of_transformers(family, pairs) -> None:
    model = randomise(tiny(family))
    batches = [{"input_ids": torch.randint(50, (2, 9))} for _ in range(2)]
    want = model(**batches[1]).last_hidden_state
    found = smooth_(model, batches, 2)
    assert len(found) == 2 * pairs
    assert min(found.values()) > 1.1
    torch.testing.assert_close(model(**batches[1]).last_hidden_state, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1.5}, "alpha"),
        ({"num_batches": 3}, "num_batches"),
        ({"pairs": [("0", ["9"])]}, "names of modules"),
        ({"pairs": [("1", ["0"])]}, "Linears of 4 inputs"),
        ({"pairs": ["0"]}, "name of the producer"),
        ({"pairs": [("2", ["1"])]}, "LayerNorm or RMSNorm"),
        ({"pairs": [("0", ["1"]), ("0", ["1"])]}, "several producers"),
    ],
)
def test_wrong_arguments_are_named(arguments, message) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4), nn.Tanh())
    with pytest.raises(Exception, match=message):
        smooth_(model, [torch.randn(3, 8)], **({"num_batches": 1} | arguments))
    with pytest.raises(ArgumentError, match="smooth before quantising"):
        smooth_(insert_fake_quantize_(model, W8A8Dynamic()), [torch.randn(3, 8)], 1)


def test_each_block_is_moved_to_the_device_and_back(monkeypatch) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc(self.norm(x))

    register_smoothing(Block, "norm", ["fc"])
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    want, x = copy.deepcopy(model), torch.randn(7, 6) * torch.linspace(1, 30, 6)
    moves: list[tuple[str, str]] = []
    names = {id(m): name for name, m in model.named_modules()}
    ordinary = nn.Module.to

    def to(self: nn.Module, device: torch.device) -> nn.Module:
        moves.append((names[id(self)], device.type))
        return ordinary(self, "cpu")

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr("pyquant.ptq.blockwise.offload.to_device", lambda tree, device: tree)
    assert smooth_(model, [x, 2 * x], 2, device="cuda") == smooth_(want, [x, 2 * x], 2)
    one_pass = [(name, place) for name in "012" for place in ("cuda", "cpu")]
    assert moves == one_pass * 4  # before, two batches, after
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters()))
    with pytest.raises(ArgumentError, match=r"'device'.*no blocks"):
        smooth_(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), [x], 1, device="cuda")
