"""Layers that leave the product of merge_ and come back: the same objects and bits, no row computed for nobody."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant import QLinear
from pyquant.nn.merged_linear import MergedLinear
from pyquant.nn.regroup import reunite, separate

SIZES = (24, 8, 16)
SCHEMES = (pyquant.W8A8Dynamic(), pyquant.W4A8Dynamic(16), pyquant.W4A8TwoLevelDynamic(16))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, n) for n in SIZES)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.children()]


def merged(scheme: pyquant.QScheme = SCHEMES[0]) -> tuple[Attention, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model, x = pyquant.quantize_(Attention(), scheme, check_speed=False).eval(), torch.randn(5, 32)
    want = model(x)
    pyquant.merge_(model)
    return model, x, want  # type: ignore[return-value]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def group_of(layer: nn.Module) -> object:
    assert isinstance(layer, MergedLinear)
    return layer._group


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@torch.no_grad()
def test_they_leave_one_by_one_and_come_back(scheme: pyquant.QScheme, order: tuple[int, ...]) -> None:
    model, x, want = merged(scheme)
    layers = list(model.children())
    for count, place in enumerate(order):
        if isinstance(layers[place], MergedLinear):
            separate(layers[place])
        assert type(layers[place]) is QLinear
        assert same(model(x), want)
        left = {id(layer._group) for layer in layers if isinstance(layer, MergedLinear)}
        assert len(left) == (1 if count == 0 else 0), "two stay together, one does not"
    for count, place in enumerate(order):
        reunite(layers[place])  # with all that are out and alike
        assert same(model(x), want), count
    assert [layer._place for layer in layers] == [0, 1, 2]  # type: ignore[union-attr]
    assert len({id(group_of(layer)) for layer in layers}) == 1
    assert list(model.children()) == layers


@torch.no_grad()
def test_no_row_is_computed_or_held_for_one_that_left() -> None:
    model, x, _ = merged()
    model(x)
    separate(model.k_proj)  # type: ignore[arg-type]
    gc.collect()
    group = group_of(model.q_proj)
    assert group.whole.out_features == SIZES[0] + SIZES[2]  # type: ignore[attr-defined]
    assert group is group_of(model.v_proj)
    held = {t.untyped_storage().data_ptr() for t in group.whole.buffers()}  # type: ignore[attr-defined]
    assert not held & {t.untyped_storage().data_ptr() for t in model.k_proj.buffers()}
    calls = []
    group.whole.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[attr-defined]
    model(x)
    assert calls == [1]
    assert group._seen is None, "all that are there have asked"  # type: ignore[attr-defined]


@torch.no_grad()
def test_layers_that_changed_meanwhile_stay_apart() -> None:
    model, x, _ = merged()
    for layer in (model.q_proj, model.k_proj):
        separate(layer)  # type: ignore[arg-type]
    model.k_proj.register_forward_hook(lambda *_: None)
    want = model(x)
    reunite(model.q_proj)  # type: ignore[arg-type]
    assert group_of(model.q_proj) is group_of(model.v_proj)
    assert type(model.k_proj) is QLinear
    assert same(model(x), want)
    alone = pyquant.quantize_(nn.Sequential(nn.Linear(8, 8)), "W8A8Dynamic", check_speed=False)[0]
    reunite(alone)  # never merged: nothing to do
    assert type(alone) is QLinear


@torch.no_grad()
def test_a_copy_is_a_family_of_its_own() -> None:
    model, x, want = merged()
    other = copy.deepcopy(model)
    assert group_of(other.q_proj) is not group_of(model.q_proj)
    separate(other.q_proj)  # type: ignore[arg-type]
    assert group_of(other.k_proj) is group_of(other.v_proj)
    assert group_of(model.q_proj) is group_of(model.k_proj)
    assert same(other(x), want)
    assert same(model(x), want)
    del model
    gc.collect()
    reunite(other.q_proj)  # type: ignore[arg-type]
    assert group_of(other.q_proj) is group_of(other.k_proj)
    assert same(other(x), want)
