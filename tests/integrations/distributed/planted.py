"""Bugs that tensor parallel code is known for, planted one at a time: the comparisons of layers.py must see each.

All ranks make the same calls, wrong ones too, and compare afterwards: a rank that stopped would leave others waiting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import pyquant
from pyquant import QEmbedding, QScheme, W4A8Dynamic, W8A8Dynamic
from pyquant.integrations.distributed import PyquantColwise, PyquantRowwise, embedding, layer, rowwise, state, sums
from tests.integrations.distributed.layers import K, layer_of, mesh_of, part, rows_of

Plant = Callable[[pytest.MonkeyPatch, int], None]


def scales_of_another_rank(patch: pytest.MonkeyPatch, world: int) -> None:
    def wrong(*args: Any) -> dict[str, Tensor]:
        return {n: t.roll(1, -1) if n == "weight_scale" else t for n, t in state.cut(*args).items()}

    patch.setattr(layer, "cut", wrong)


def bias_on_every_rank(patch: pytest.MonkeyPatch, world: int) -> None:
    true = rowwise.RowwiseQLinear._packed_numbers

    def wrong(self: Any, held: Any) -> tuple[Tensor | None, ...]:
        bias, *others = true(self, held)
        return (None if bias is None else bias * world, *others)

    patch.setattr(rowwise.RowwiseQLinear, "_packed_numbers", wrong)


def ranges_of_the_rank_alone(patch: pytest.MonkeyPatch, world: int) -> None:
    true = dist.all_reduce

    def wrong(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **words: Any) -> Any:
        return None if op == dist.ReduceOp.MAX else true(tensor, op, **words)

    patch.setattr(sums.dist, "all_reduce", wrong)


def zero_point_on_every_rank(patch: pytest.MonkeyPatch, world: int) -> None:
    true = rowwise.RowwiseQLinear._accumulators

    def wrong(self: Any, data: Tensor, x_scale: Tensor, zero_point: Tensor, per_token: bool) -> Tensor:
        term = true(self, torch.ones_like(data), x_scale, None, per_token) * zero_point.unsqueeze(-1)
        dist.all_reduce(term)  # of the whole rows of the weight
        return true(self, data, x_scale, None, per_token) - term

    patch.setattr(rowwise.RowwiseQLinear, "_accumulators", wrong)


def base_of_the_rank_alone(patch: pytest.MonkeyPatch, world: int) -> None:
    class Local:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def full_tensor(self) -> Tensor:
            return self.tensor

    patch.setattr(rowwise.RowwiseQLinear, "_placed", lambda self, name, tensor: Local(tensor))


def activation_before_the_sum(patch: pytest.MonkeyPatch, world: int) -> None:
    true = rowwise.summed

    def wrong(parts: Tensor, *words: Any) -> Tensor:
        return true(parts.clamp(min=0), *words)

    patch.setattr(rowwise, "summed", wrong)


def rows_of_another_rank(patch: pytest.MonkeyPatch, world: int) -> None:
    def wrong(*args: Any) -> dict[str, Tensor]:
        parts = state.cut(*args)
        return {n: t.flip(0) if n == "weight" else t for n, t in parts.items()}

    patch.setattr(embedding, "cut", wrong)


def scales_of_other_tokens(patch: pytest.MonkeyPatch, world: int) -> None:
    true = rowwise.share_of

    def wrong(tensor: Tensor, layouts: Any, placement: Any, dims: int) -> Tensor:
        taken = true(tensor, layouts, placement, dims)
        return taken.roll(1, -1)

    patch.setattr(rowwise, "share_of", wrong)


def run(style: Any, scheme: QScheme, plant: Plant | None, rank: int, world: int, **words: Any) -> bool:
    """Whether a layer under this style gives the bits of the whole one."""
    whole, x = layer_of(scheme, **words), rows_of(1, 3, 8, K)
    want = whole(x)
    if isinstance(style, PyquantColwise):
        want = part(want, world, rank)
    elif style._outputs == Shard(1):
        want = part(want, world, rank, 1)
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch, world)
        cut = parallelize_module(copy.deepcopy(whole), mesh_of(world), style)
        got = cut(part(x, world, rank) if isinstance(style, PyquantRowwise) else x)
    return torch.equal(got, want)


def of_table(plant: Plant | None, rank: int, world: int) -> bool:
    torch.manual_seed(0)
    whole, ids = QEmbedding.from_float(torch.nn.Embedding(40, 16)), torch.arange(40).view(4, 10)
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch, world)
        got = parallelize_module(copy.deepcopy(whole), mesh_of(world), PyquantRowwise())(ids)
    return torch.equal(got, whole(ids))


AFFINE = W8A8Dynamic(symmetric_inputs=False)
TWO_LEVEL = pyquant.W4A8TwoLevelDynamic(16)
CALLS: dict[str, tuple[Callable[..., bool], Plant]] = {
    "scales, colwise": (partial(run, PyquantColwise(), W8A8Dynamic()), scales_of_another_rank),
    "scales, groups": (partial(run, PyquantRowwise(), TWO_LEVEL), scales_of_another_rank),
    "bias": (partial(run, PyquantRowwise(), W8A8Dynamic()), bias_on_every_rank),
    "bias, static": (partial(run, PyquantRowwise(), pyquant.W8A8()), bias_on_every_rank),
    "ranges": (partial(run, PyquantRowwise(), W8A8Dynamic()), ranges_of_the_rank_alone),
    "ranges, affine": (partial(run, PyquantRowwise(), AFFINE), ranges_of_the_rank_alone),
    "zero points": (partial(run, PyquantRowwise(), AFFINE), zero_point_on_every_rank),
    "two levels": (partial(run, PyquantRowwise(), TWO_LEVEL), base_of_the_rank_alone),
    "activation": (partial(run, PyquantRowwise(), W4A8Dynamic(None), activation="relu"), activation_before_the_sum),
    "tokens": (partial(run, PyquantRowwise(output_layouts=Shard(1)), W8A8Dynamic()), scales_of_other_tokens),
    "rows": (of_table, rows_of_another_rank),
}


def case(name: str, rank: int, world: int, folder: Path) -> None:
    call, plant = CALLS[name]
    right, planted = call(None, rank=rank, world=world), call(plant, rank=rank, world=world)
    seen = torch.tensor([0 if right else 1, 0 if planted else 1])
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    assert seen.tolist() == [0, 1], f"wrong without a bug: {seen[0]}, with one: {seen[1]}"


CASES = {name: partial(case, name) for name in CALLS}
