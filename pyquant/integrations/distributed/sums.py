"""What ranks that hold columns of one weight matrix must agree on: ranges of rows, and sums of accumulators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from pyquant.core.scheme import TensorScheme
from pyquant.integrations.distributed.layouts import Layouts, bounds, is_last

_ops = torch.ops.pyquant


def token_params(x: Tensor, scheme: TensorScheme, group: Any) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of every row of which the ranks hold columns, as the whole row has them.

    x       float32, float16 or bfloat16 [..., columns of this rank].
    scheme  dynamic, per token.
    ->      float32 and (affine schemes) int32 [...], the same on every rank: NaN where any rank has NaN or infinity.
    Largest values are reduced, which is exact; a NaN travels as infinity, since not every backend's maximum keeps it.
    Source: docs/numerics.md 2.1.
    """
    rows = x.detach()
    if rows.shape[-1] == 0:  # a rank without columns has no say; a range always contains 0
        rows = rows.new_zeros((*rows.shape[:-1], 1))
    low, high = -rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    ends = torch.maximum(low, high) if scheme.symmetric else torch.cat([low, high], -1)
    ends = ends.to(torch.float32).nan_to_num(torch.inf, torch.inf, -torch.inf)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    if not scheme.symmetric:
        ends = torch.cat([-ends[..., :1], ends[..., 1:]], -1)
    # A row of its own ends has the range of the whole row.
    _, scale, zero_point = _ops.quantize_dynamic.default(ends, "per_token", 0, scheme.symmetric, *scheme.code_range)
    return scale, None if scheme.symmetric else zero_point


def summed(parts: Tensor, layouts: Layouts, outputs: Placement) -> Tensor:
    """The sum over the ranks of int32 or float32 [..., N], of which each gets what `outputs` says: all, or a share.

    parts  contiguous; overwritten.
    """
    if isinstance(outputs, Shard) and not is_last(outputs, parts.dim()):
        placed = DTensor.from_local(parts, layouts.mesh, [Partial()], run_check=False)
        return placed.redistribute(placements=[outputs]).to_local()
    dist.all_reduce(parts, group=layouts.group)
    return share_of(parts, layouts, outputs, parts.dim())


def share_of(tensor: Tensor, layouts: Layouts, placement: Placement, dims: int) -> Tensor:
    """This rank's share of a tensor that every rank has whole; the layout counts so many dimensions."""
    if not isinstance(placement, Shard):
        return tensor
    dim = placement.dim % dims
    begin, end = bounds(tensor.shape[dim], layouts.world, layouts.rank)
    return tensor.narrow(dim, begin, end - begin)
