"""Moments of a layer's inputs: what is summed, in panels too, and what corrected targets are made of."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyquant import W4A16, insert_fake_quantize_
from pyquant.ptq.blockwise.stage import LayerState, Stage
from pyquant.ptq.improve.moments import Moments, moments_of, targets
from pyquant.ptq.improve.replay import Replay


def stage_of(width: int, batches: list[Tensor]) -> Stage:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
    insert_fake_quantize_(model, W4A16(group_size=None))
    layers = {name: model.get_submodule(name) for name in ("0", "2")}
    replay = Replay(model, batches, len(batches))
    before = tuple(LayerState.of(layer) for layer in layers.values())
    return Stage("model", model, layers, {"0": 1, "2": 1}, replay, replay, before)


@pytest.mark.parametrize("width", [20, 600, 1030])  # one panel of the products, two, three
def test_sums_over_rows(width) -> None:
    batches = [torch.randn(9, width, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    stage = stage_of(width, batches)
    floats = copy.deepcopy(stage.module)
    found, names = moments_of(stage, ["2"], 3, cross=True)
    assert names == ["2"]
    with torch.no_grad():
        seen = torch.cat([stage.module[1](stage.module[0](x)) for x in batches[:3]]).double()
        wanted = torch.cat([torch.relu(nn.functional.linear(x, floats[0].weight, floats[0].bias)) for x in batches[:3]])
    moved = wanted.double() - seen
    assert float(moved.abs().max()) > 1e-3
    assert found.rows == 27
    assert torch.equal(found.hessian, found.hessian.t()) or width < 513
    for got, want in (
        (found.hessian, seen.t() @ seen),
        (found.cross, moved.t() @ seen),
        (found.total, seen.sum(0)),
        (found.moved, moved.sum(0)),
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    alone, _ = moments_of(stage, ["2"], 3, cross=False)
    assert alone.cross is None
    assert torch.equal(alone.hessian, found.hessian)


def test_targets_of_many_rows_and_of_few_are_the_least_squares_of_numpy() -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(300, 12, generator=g).double()
    seen = x + 0.3 * torch.randn(300, 12, generator=g)
    moved = x - seen
    for order in ((5, 30), (30, 5)):  # one by one, or by what the layer with many rows has left for the other
        moments = Moments(seen.t() @ seen, moved.t() @ seen, seen.sum(0), moved.sum(0), 300)
        for n in order:
            weight = torch.randn(n, 12, generator=g)
            want = np.linalg.lstsq(seen.numpy(), (x @ weight.double().t()).numpy(), rcond=None)[0].T
            np.testing.assert_allclose(targets(weight, moments, 1e-12).numpy(), want, rtol=1e-6, atol=1e-6)
