"""Layers that are given one tensor: which are found, which are not, and that codes are the same whether they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pyquant import W4A8, W4A16, W4A8Dynamic, gptq_, insert_fake_quantize_
from pyquant.ptq.improve import gptq, moments
from pyquant.ptq.improve.same_input import checked, noting_groups, rounded_alike
from pyquant.simulate.calibrate import calibrate_

NAMES = ("q", "k", "v", "o", "gate", "up", "down")


class Block(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        q = self.q(h)
        if self.between is not None:
            h = self.between(h)
        x = x + self.o(torch.tanh(q * self.k(h)) + self.v(h))
        h = torch.tanh(x)
        return x + self.down(torch.relu(self.gate(h)) * self.up(h))


def simulated(scheme, between: Callable[[Tensor], Tensor] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = insert_fake_quantize_(nn.Sequential(Block(between), Block(between)), scheme)
    calibrate_(model, data(4), num_batches=4)
    return model


def data(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    mixed = torch.randn(16, 16, generator=g) / 4
    return [torch.randn(30, 16, generator=g) @ mixed for _ in range(count)]


def groups_of(block: nn.Module, calls: dict[str, int] | None = None) -> list[list[str]]:
    layers = {name: block.get_submodule(name) for name in NAMES}
    with noting_groups(layers, calls or dict.fromkeys(NAMES, 1)) as groups:
        block(data(1)[0])
    return groups


APART = [["q"], ["k", "v"], ["o"], ["gate", "up"], ["down"]]


def test_groups_of_a_block() -> None:
    block = simulated(W4A16(group_size=8))[0]
    assert groups_of(block) == [["q", "k", "v"], ["o"], ["gate", "up"], ["down"]]
    assert groups_of(block, {**dict.fromkeys(NAMES, 1), "k": 2}) == [["q", "v"], ["o"], ["gate", "up"], ["down"]]
    assert not any(block.get_submodule(name)._forward_pre_hooks for name in NAMES)


@pytest.mark.parametrize("between", [lambda h: h.clone(), lambda h: h.mul_(2.0), lambda h: h[:]])
def test_another_tensor_or_a_changed_one_is_not_the_same(between) -> None:
    assert groups_of(simulated(W4A16(group_size=8), between)[0]) == APART


def test_tensors_whose_changes_nobody_counts_are_not_the_same() -> None:
    block = simulated(W4A16(group_size=8))[0]
    with torch.inference_mode():
        assert groups_of(block) == [[name] for name in NAMES]


def test_layers_that_round_their_inputs_in_other_ways_are_not_alike() -> None:
    block = simulated(W4A8(None))[0]
    assert rounded_alike(block.q, block.k)  # calibrated with the same data
    block.k.input_fake_quant.scale.mul_(2)
    assert not rounded_alike(block.q, block.k)
    assert rounded_alike(block.q, block.v)
    other = simulated(W4A8Dynamic(group_size=8))[0]
    assert rounded_alike(other.q, other.k)
    assert not rounded_alike(block.q, other.k)
    assert not rounded_alike(block.q, simulated(W4A16(group_size=8))[0].q)
    assert groups_of(block) == [["q"], ["k"], ["v"], ["o"], ["gate", "up"], ["down"]]


def test_every_pass_is_checked() -> None:
    block = simulated(W4A16(group_size=8))[0]
    layers, sharing = [block.q, block.k, block.v], [True] * 3
    with checked(layers, sharing):
        block(data(1)[0])
        assert sharing == [True, True, True]
        block.q(data(1)[0])
        block.k(data(1)[0])
        assert sharing == [True, False, True]
    block.v(data(1)[0])
    assert sharing == [True, False, True]


@pytest.mark.parametrize("correct_targets", [None, False, True])
@pytest.mark.parametrize("scheme", [W4A16(group_size=8, symmetric=False), W4A8(None), W4A8Dynamic(group_size=8)])
def test_codes_are_those_of_layers_looked_at_one_by_one(scheme, correct_targets, monkeypatch) -> None:
    model, counts = simulated(scheme), []
    alone = copy.deepcopy(model)
    ldl_of = moments.ldl_of
    monkeypatch.setattr(moments, "ldl_of", lambda *given, **how: counts.append(0) or ldl_of(*given, **how))
    found = gptq_(model, data(8), 8, correct_targets=correct_targets)
    assert len(counts) == 2 * 4 * 2  # blocks, inputs, orders
    monkeypatch.setattr(gptq._Seen, "from_here", lambda _, name: [name])
    counts.clear()
    assert gptq_(alone, data(8), 8, correct_targets=correct_targets) == found
    assert len(counts) == 2 * 7 * 2
    assert any(layer.accepted for layer in found.values())
    for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b), name


class Switching(nn.Module):
    """The second layer is given the first one's input, but for the first batch of all, with which it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x if len(x) == 30 else x * 0.5)


def test_a_layer_that_is_given_something_else_in_one_pass_has_moments_of_its_own() -> None:
    torch.manual_seed(0)
    model = insert_fake_quantize_(Switching(), W4A16(group_size=8))
    batches = data(4)
    batches[0] = torch.cat([batches[0], batches[0]])
    expected = copy.deepcopy(model)
    gptq_(model, batches, 4, correct_targets=False, act_order=False, error=lambda a, b: 0.0)
    x = torch.cat([batches[0] * 0.5, *batches[1:3]])
    scale, _ = expected.b.weight_fake_quant.qparams(expected.b.weight)
    codes = gptq.codes_by(
        expected.b.weight, moments.ldl_of((x.t() @ x).double(), 0.01, act_order=False), scale, qmin=-7, qmax=7
    )
    real = (codes.float().reshape(16, 2, 8) * scale[..., None]).reshape(16, 16)
    assert float((real == model.b.weight).float().mean()) > 0.99  # sums of other sizes differ in their last bit
    x = torch.cat(batches[:3])
    wrong = gptq.codes_by(
        expected.b.weight, moments.ldl_of((x.t() @ x).double(), 0.01, act_order=False), scale, qmin=-7, qmax=7
    )
    assert float((wrong == codes).float().mean()) < 0.99


class Halving(Switching):
    """The same, in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        y = self.a(h)
        if len(x) != 30:
            h.mul_(0.5)
        return y + self.b(h)


def test_a_tensor_that_is_changed_in_one_pass_counts_as_it_was_given(monkeypatch) -> None:
    torch.manual_seed(0)
    model = insert_fake_quantize_(Halving(), W4A8Dynamic(group_size=8))
    alone, batches = copy.deepcopy(model), data(4)
    batches[0] = torch.cat([batches[0], batches[0]])
    found = gptq_(model, batches, 4, correct_targets=True, error=lambda a, b: 0.0)
    monkeypatch.setattr(gptq._Seen, "from_here", lambda _, name: [name])
    assert gptq_(alone, batches, 4, correct_targets=True, error=lambda a, b: 0.0) == found
    for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b), name
