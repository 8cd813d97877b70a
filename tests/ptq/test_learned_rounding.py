"""learn_rounding_: neighbours of the nearest codes that lower what a block loses, where held-out data agrees."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyquant import (
    W4A4,
    W4A8,
    W4A16,
    ArgumentError,
    NonFiniteError,
    QScheme,
    W4A8TwoLevelDynamic,
    bias_correction_,
    convert_,
    gptq_,
    insert_fake_quantize_,
    learn_rounding_,
)
from pyquant.ptq.improve.matrix import matrix_of
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.float_model import floating_point


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net(kind: str = "blocks") -> nn.Module:
    torch.manual_seed(0)
    if kind == "convolutions":
        return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)).eval()
    return nn.Sequential(Block(), Block()).eval()


def data(kind: str = "blocks", count: int = 4) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    if kind == "convolutions":
        shared = [torch.randn(9, 1, 8, 8, generator=g) for _ in range(count)]  # channels that depend on each other
        return [2 * part + 0.3 * torch.randn(9, 4, 8, 8, generator=g) for part in shared]
    mix = torch.randn(16, 16, generator=g) / 4
    return [torch.randn(32, 16, generator=g) @ mix for _ in range(count)]


def simulating(scheme: QScheme, kind: str = "blocks") -> nn.Module:
    return calibrate_(insert_fake_quantize_(net(kind), scheme), data(kind), 4)


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "codes_of")}
    return {n: m.codes_of(matrix_of(m))["codes"].int() for n, m in layers.items()}


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (W4A8(group_size=None), "blocks"),
        (W4A4(symmetric_inputs=False), "blocks"),
        (W4A16(group_size=8, symmetric=False), "blocks"),
        (W4A8TwoLevelDynamic(8), "blocks"),
        (W4A8(group_size=None), "convolutions"),
        (W4A16(group_size=12), "convolutions"),
    ],
    ids=str,
)
def test_codes_are_neighbours_of_the_nearest_and_better(scheme: QScheme, kind: str) -> None:
    model = simulating(scheme, kind)
    nearest, plain = codes_of(model), copy.deepcopy(model)
    found = learn_rounding_(model, data(kind), 4, steps=200 if kind == "convolutions" else 40, error="mse")
    assert list(found) == list(nearest)
    assert all(layer.accepted for layer in found.values())
    qmin, qmax = scheme.weights.code_range
    for name, codes in codes_of(model).items():
        moved = (codes - nearest[name]).abs()
        assert int(moved.max()) == 1
        assert abs(float((moved > 0).float().mean()) - found[name].moved) < 1e-6
        assert qmin <= int(codes.min()) <= int(codes.max()) <= qmax
    unseen, floats = data(kind, 8)[4:], net(kind)
    with torch.no_grad():
        before, after = (sum(float((m(x) - floats(x)).square().sum()) for x in unseen) for m in (plain, model))
        inputs = scheme.inputs  # of 4 bits: their error is most of it
        assert after < (0.95 if inputs is not None and inputs.bits == 4 else 0.9) * before
        want = model(unseen[0])
        assert torch.allclose(convert_(model)(unseen[0]), want, atol=1e-5)


def test_the_seed_decides_and_nothing_else() -> None:
    one, again, other = (simulating(W4A8(group_size=None)) for _ in range(3))
    torch.manual_seed(5)
    found = learn_rounding_(one, data(), 4, steps=20, seed=3)
    torch.manual_seed(6)
    assert learn_rounding_(again, iter(data()), 4, steps=20, seed=3) == found
    assert equal(one, again)
    learn_rounding_(other, data(), 4, steps=20, seed=4)
    assert not equal(one, other)


def test_what_held_out_data_does_not_like_is_not_kept() -> None:
    model = simulating(W4A8(group_size=None))
    before, modules = (
        copy.deepcopy(model),
        [m.weight_fake_quant for m in model.modules() if hasattr(m, "weight_fake_quant")],
    )
    held_out = [*data()[:3], 0 * data()[0] + 3.0]  # one that is unlike the others, whose mean is all that counts
    found = learn_rounding_(model, held_out, 4, steps=2, learning_rate=1.0)  # far too long steps
    assert not any(layer.accepted for layer in found.values())
    assert all(layer.error_after > layer.error_before for layer in found.values())
    assert equal(model, before)
    assert modules == [m.weight_fake_quant for m in model.modules() if hasattr(m, "weight_fake_quant")]


def test_it_goes_on_after_the_last_finished_block(tmp_path: Path) -> None:
    def ends(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    want, ended, resumed = (simulating(W4A8(group_size=None)) for _ in range(3))
    found = learn_rounding_(want, data(), 4, steps=5)
    with pytest.raises(KeyboardInterrupt):
        learn_rounding_(ended, data(), 4, steps=5, save_to=tmp_path, progress=ends)
    assert learn_rounding_(resumed, data(), 4, steps=5, save_to=tmp_path) == found
    assert equal(resumed, want)


def test_on_an_error_the_model_is_as_before() -> None:
    model = simulating(W4A8(group_size=None)).train()
    before, batches = copy.deepcopy(model), data()
    batches[0][0, 0] = torch.nan  # one to learn from
    with pytest.raises(NonFiniteError, match="output of 0"):
        learn_rounding_(model, batches, 4, steps=8)
    assert equal(model, before)
    assert model.training


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("steps", {"steps": 0}),
        ("learning_rate", {"learning_rate": 0.0}),
        ("seed", {"seed": -1}),
        ("num_held_out", {"num_held_out": 4}),
        ("error", {"error": "l1"}),
        ("blocks", {"blocks": "nowhere"}),
    ],
)
def test_wrong_arguments_are_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=name):
        learn_rounding_(simulating(W4A8(group_size=None)), data(), 4, **options)


def test_after_gptq_the_float_model_is_the_one_before_it() -> None:
    """Each improver measures against the model that was quantised, not against what another one made of it."""
    floats, model = net(), simulating(W4A8(group_size=None))
    gptq_(model, data(), 4)
    with torch.no_grad(), floating_point(model):
        assert torch.equal(model(data()[0]), floats(data()[0]))
        assert torch.equal(copy.deepcopy(model)(data()[0]), floats(data()[0]))
    chosen = codes_of(model)
    found = learn_rounding_(model, data(), 4, steps=20)
    nearest = codes_of(simulating(W4A8(group_size=None)))
    for name, codes in codes_of(model).items():
        assert int((codes - nearest[name]).abs().max()) <= 1 or torch.equal(codes, chosen[name])
        assert found[name].accepted or torch.equal(codes, chosen[name])
    bias_correction_(model, data(), 4)
    means = [torch.cat([m(x) for x in data()]).double().mean(0) for m in (floats, model)]
    assert float((means[0] - means[1]).abs().max()) < 1e-5


def test_the_float_model_follows_training_and_loading() -> None:
    model = simulating(W4A16(group_size=None))
    gptq_(model, data(), 4)
    with torch.no_grad():
        model[0].up.weight.mul_(2)
    with floating_point(model):
        assert torch.equal(model[0].up.weight, model.state_dict()["0.up.weight"])
    other = copy.deepcopy(model)
    with floating_point(other):  # what is stale stays stale in a copy
        assert torch.equal(other[0].up.weight, model[0].up.weight)


def test_float_weights_that_were_let_go_are_missed_aloud(tmp_path: Path) -> None:
    model = simulating(W4A16(group_size=None))
    gptq_(model, data(), 4, save_to=tmp_path)
    for improve in (bias_correction_, gptq_, learn_rounding_):
        with pytest.raises(ArgumentError, match=r"save_to let go: 0\.up"):
            improve(model, data(), 4)
    convert_(model)
