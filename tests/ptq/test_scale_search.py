"""search_scales_: each pair's factors by what rounding costs, none of them where the held-out outputs say so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from block_nets import Decoder
from torch import Tensor, nn

from pyquant import W4A8, W4A16, PyquantError, W4A4Dynamic, W8A8Dynamic, insert_fake_quantize_
from pyquant.nn.weights import dequantise_weight, quantise_weight
from pyquant.ptq.improve.scale_search import search_scales_
from pyquant.ptq.improve.smooth import smooth_


def skewed() -> tuple[nn.Module, list[Tensor]]:
    """Norms whose channels differ by a hundred, and columns that take it back."""
    torch.manual_seed(2)
    layers = [layer for _ in range(2) for layer in (nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(16, 6)).eval()
    with torch.no_grad():
        for norm, linear in ((model[0], model[1]), (model[3], model[4])):
            spread = torch.logspace(0, 2, 16)[torch.randperm(16)]
            norm.weight *= spread
            linear.weight /= spread
    return model, [torch.randn(50, 16) for _ in range(8)]


def rounded_error(model: nn.Module, want: nn.Module, scheme: Any, x: Tensor) -> float:
    rounded = insert_fake_quantize_(copy.deepcopy(model), scheme)
    with torch.no_grad():
        return float((rounded(x) - want(x)).square().sum() / want(x).square().sum())


@pytest.mark.parametrize("scheme", [W4A4Dynamic(), W8A8Dynamic()], ids=str)
def test_it_is_as_good_as_smoothing_and_better_than_nothing(scheme) -> None:
    model, data = skewed()
    floats, smoothed = copy.deepcopy(model), copy.deepcopy(model)
    modules = list(model.modules())
    found = search_scales_(model, scheme, data, 8)
    smooth_(smoothed, data, 8)
    assert found.chosen != "none"
    assert found.errors[found.chosen] == min(found.errors.values())
    assert set(found.found) == {"0", "3", "4"}
    assert list(model.modules()) == modules  # the very modules, simulating layers are gone
    x = torch.randn(500, 16)
    torch.testing.assert_close(model(x), floats(x), rtol=1e-4, atol=1e-4)
    errors = [rounded_error(m, floats, scheme, x) for m in (model, smoothed, floats)]
    assert errors[0] < 0.5 * errors[2]
    assert errors[0] < 1.3 * errors[1]


def test_none_where_the_judge_prefers_none() -> None:
    model, data = skewed()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    calls: list[int] = []

    def rises(floats: Tensor, output: Tensor) -> float:
        calls.append(len(calls))
        return float(len(calls))

    found = search_scales_(model, W4A8(None), data, 8, error=rises, num_held_out=1)
    assert (found.chosen, found.errors) == ("none", {"none": 1.0, "smoothed": 2.0, "searched": 3.0})
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    falls = search_scales_(model, W4A8(None), data, 8, error=lambda a, b: -rises(a, b), num_held_out=1)
    assert falls.chosen == "searched"
    assert not all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_the_factors_of_a_pair_are_the_best_of_those_that_are_tried() -> None:
    """By its definition, for weights alone: every factor by hand, on the held-out rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 5)).eval()
    with torch.no_grad():
        model[0].weight *= torch.logspace(0, 1.5, 12)
    data, scheme = [torch.randn(100, 12) for _ in range(4)], W4A16(group_size=None)
    with torch.no_grad():
        seen, rows = model[0](torch.cat(data[:3])), model[0](data[3])
    weight, amax, mean = model[1].weight.detach().clone(), seen.abs().amax(0), seen.abs().mean(0)
    costs: dict[Any, float] = {}
    for step in range(9):
        alpha = step / 8
        factors = {("smooth", alpha): amax**alpha / weight.abs().amax(0) ** (1 - alpha)}
        if step:
            factors["mean", alpha] = mean**alpha / (mean.max() * mean.min()) ** (alpha / 2)
        for how, s in factors.items():
            codes, scale, _ = quantise_weight(weight * s, scheme.weights)
            real = dequantise_weight(codes, scale, None, scheme.weights) / s
            costs[how] = float((rows @ (real - weight).t()).square().sum())
    codes, scale, _ = quantise_weight(weight, scheme.weights)
    costs[None] = float((rows @ (dequantise_weight(codes, scale, None, scheme.weights) - weight).t()).square().sum())
    found = search_scales_(model, scheme, data, 4, error=lambda a, b: 0.0, num_held_out=1)
    assert found.chosen == "none"  # of equals the simplest
    assert costs[found.found["0"]] <= 1.001 * min(costs.values())
    assert min(costs.values()) < 0.9 * costs[None]


def test_layers_that_the_config_leaves_alone_get_no_factors() -> None:
    model, data = skewed()
    found = search_scales_(model, {"_default": W4A8(None), "1": None, "4": None}, data, 8)
    assert found.found["0"] is found.found["3"] is None
    assert found.found["4"] is not None


def test_on_an_error_the_model_is_as_before() -> None:
    model, data = skewed()
    before, modules = {name: t.clone() for name, t in model.state_dict().items()}, list(model.modules())
    count = 0

    def breaks(floats: Tensor, output: Tensor) -> float:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        search_scales_(model.train(), W4A8(None), data, 8, error=breaks, num_held_out=1)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert list(model.modules()) == modules
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_batches": 9}, "num_batches"),
        ({"num_held_out": 4}, "num_held_out"),
        ({"error": "cosine"}, "error"),
        ({"config": "W5A5"}, "W5A5"),
        ({"pairs": [("0", ["6"])]}, "an output that moved"),
        ({"pairs": [("nothing", ["1"])]}, "pairs"),
        ({"model": nn.Sequential(nn.Linear(2, 2))}, "no rule finds a pair|in which no rule"),
        ({"model": Decoder(1)}, "rule"),
    ],
)
def test_wrong_arguments_are_named(change, message) -> None:
    model, data = skewed()
    given: dict[str, Any] = {"model": model, "config": W4A8(None), "data": data, "num_batches": 4} | change
    with pytest.raises(Exception, match=message) as raised:
        search_scales_(**given)
    assert isinstance(raised.value, PyquantError)
