"""Layers that are called by the name of torch's argument, `layer(input=x)`, as models by others do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.core.presets import FP16, W4A16, W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.nn.reordered import Reordered
from pyquant.nn.two_forms import TwoFormLinear

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(5))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(6))


class Named(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(input=x)
        return y


class Positional(Named):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def both(layer: nn.Module, change: Callable[[nn.Module], object], x: Tensor) -> tuple[Tensor, Tensor]:
    """What the changed layer gives, called by name and by position."""
    models = [kind(copy.deepcopy(layer)).eval() for kind in (Named, Positional)]
    for model in models:
        change(model)
    assert type(models[0].layer) is type(models[1].layer)
    assert type(models[0].layer) is not type(layer)
    return models[0](x), models[1](x)


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W8A8(), W4A16(None), FP16()], ids=str)
@pytest.mark.parametrize(("layer", "x"), [(nn.Linear(16, 16), X), (nn.Conv2d(3, 4, 3), IMAGES)], ids=["linear", "conv"])
def test_quantised(layer: nn.Module, x: Tensor, scheme: pyquant.QScheme) -> None:
    data = [x] * 2 if scheme.inputs is not None and not scheme.inputs.dynamic else None
    named, want = both(layer, lambda m: pyquant.quantize_(m, scheme, data=data, check_speed=False), x)
    assert torch.equal(named, want)


@pytest.mark.parametrize("improve", ["gptq", "bias_correction"])
@pytest.mark.parametrize(("layer", "x"), [(nn.Linear(16, 16), X), (nn.Conv2d(3, 4, 3), IMAGES)], ids=["linear", "conv"])
def test_improved_with_data(layer: nn.Module, x: Tensor, improve: str) -> None:
    options: dict[str, Any] = {"data": [x] * 4, "improve": [improve], "check_speed": False}
    named, want = both(layer, lambda m: pyquant.quantize_(m, W4A8Dynamic(group_size=None), **options), x)
    assert torch.equal(named, want)


@pytest.mark.parametrize(("layer", "x"), [(nn.Linear(16, 16), X), (nn.Conv2d(3, 4, 3), IMAGES)], ids=["linear", "conv"])
def test_trained(layer: nn.Module, x: Tensor) -> None:
    named, want = both(layer, lambda m: pyquant.prepare_qat_(m, W8A8Dynamic()), x)
    assert torch.equal(named, want)


def test_smoothing_sees_the_inputs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(input=self.norm(x))
            return y

    model = Pair().eval()
    want = model(X)
    pyquant.smooth_(model, [X], num_batches=1, pairs=[("norm", ["linear"])])
    assert not torch.equal(model.norm.weight, torch.ones(16))
    torch.testing.assert_close(model(X), want)


def test_layers_of_other_kinds() -> None:
    rows = pyquant.quantize_(nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 4)), W8A8Dynamic(), embeddings=True)
    ids = torch.tensor([1, 8, 0])
    assert torch.equal(rows[0](input=ids), rows[0](ids))
    turned = pyquant.HadamardLinear.from_linear(nn.Linear(16, 4))
    assert torch.equal(turned(input=X), turned(X))
    inner = pyquant.quantize_(nn.Sequential(nn.Linear(16, 4)), W8A8Dynamic(), check_speed=False)[0]
    sorted_ = Reordered(inner, torch.arange(15, -1, -1))
    assert torch.equal(sorted_(input=X), sorted_(X))
    two = pyquant.quantize_(nn.Sequential(nn.Linear(16, 4)), W4A16(None), check_speed=False)[0]
    two = TwoFormLinear.of(two, ((4, float("inf")),))
    for x in (X, X[:2]):
        assert torch.equal(two(input=x), two(x))


def test_merged_layers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.q_proj(input=x), self.k_proj(input=x)], -1)

    model = pyquant.quantize_(Two().eval(), W8A8Dynamic(), check_speed=False)
    want = model(X)
    pyquant.merge_(model, X)
    assert type(model.q_proj).__name__ == "MergedLinear"
    assert torch.equal(model(X), want)


def test_one_name_only() -> None:
    layer = pyquant.quantize_(nn.Sequential(nn.Linear(16, 4)), W8A8Dynamic(), check_speed=False)[0]
    with pytest.raises(pyquant.ArgumentError, match="'x': got given, and input as well"):
        layer(X, input=X)
    with pytest.raises(pyquant.ArgumentError, match="'x': got None"):
        layer()
