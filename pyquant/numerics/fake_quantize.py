"""Fake quantisation: codes there and back in one step, and its gradients (docs/numerics.md 10)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from pyquant.core.granularity import scale_shape
from pyquant.numerics.norm import sum_of_lanes
from pyquant.numerics.qparams import scale_recip
from pyquant.numerics.quantize import _grouped, _spread, dequantize, quantize, quantize_dynamic

BLOCK: Final = 1024  # elements of one partial sum of sum_in_blocks
BLOCK_LANES: Final = 64


def pack_mask(inside: Tensor) -> Tensor:
    """Bits of a boolean tensor in row-major order, uint8 [ceil(numel / 8)]: bit i % 8 of byte i / 8; the rest is 0."""
    flat = inside.reshape(-1).to(torch.uint8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=inside.device)
    return (F.pad(flat, (0, -flat.numel() % 8)).reshape(-1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack_mask(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of pack_mask: bool of the given shape."""
    at = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits = (mask.unsqueeze(-1) >> at) & 1
    return bits.reshape(-1)[: torch.Size(shape).numel()].reshape(shape).bool()


def sum_in_blocks(v: Tensor) -> Tensor:
    """Sum over the last dimension in the one order that every backend keeps.

    v   float32 [..., K].
    ->  float32 [...]. Blocks of 1024 neighbours; inside a block element i belongs to lane i % 64, a lane adds its
        elements, ascending, to +0, and the lanes are added pairwise, neighbours first. The sums of the blocks are
        summed in the same way until one is left. Elements that are not there count as +0 and change nothing.
    Source: docs/numerics.md 10.4.

    Example:
        >>> sum_in_blocks(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.5, 0.0]])).tolist()
        [6.0, 1.0]
    """
    while True:
        blocks = max(-(-v.shape[-1] // BLOCK), 1)
        steps = F.pad(v, (0, blocks * BLOCK - v.shape[-1])).unflatten(-1, (blocks, BLOCK // BLOCK_LANES, BLOCK_LANES))
        v = sum_of_lanes(steps)
        if blocks == 1:
            return v[..., 0]


def _steps(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, granularity: str, group_size: int, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fl(x * recip), its rint, and the limits of that rint, by elements that share a scale."""
    shape = scale_shape(granularity, x.shape, group_size)
    offset = torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else zero_point
    low = _spread((qmin - offset).to(torch.float32), granularity, shape)
    high = _spread((qmax - offset).to(torch.float32), granularity, shape)
    v = _grouped(x.to(torch.float32), granularity, group_size) * _spread(scale_recip(scale), granularity, shape)
    return v, torch.round(v), low, high


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor]:
    """dequantize(quantize(x)) in the type of x; pack_mask of qmin <= rint(x * recip) + zero_point <= qmax, 0 for NaN.

    Source: docs/numerics.md 10.1.
    """
    codes = quantize(x, scale, zero_point, granularity, group_size, qmin, qmax)
    y = dequantize(codes, scale, zero_point, granularity, group_size, x.dtype)
    _, rounded, low, high = _steps(x, scale, zero_point, granularity, group_size, qmin, qmax)
    return y, pack_mask((rounded >= low) & (rounded <= high))


def fake_quantize_dynamic(
    x: Tensor,
    granularity: str = "per_channel",
    group_size: int = 0,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same under scales made from the data: quantize_dynamic, then dequantize (docs/numerics.md 10.2)."""
    codes, scale, zero_point = quantize_dynamic(x, granularity, group_size, symmetric, qmin, qmax)
    y = dequantize(codes, scale, None if symmetric else zero_point, granularity, group_size, x.dtype)
    return y, scale, zero_point


def fake_quantize_backward(grad: Tensor, mask: Tensor) -> Tensor:
    """grad where the mask is 1, else +0. Source: docs/numerics.md 10.3."""
    return torch.where(unpack_mask(mask, tuple(grad.shape)), grad, 0.0).contiguous()


def fake_quantize_lsq_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor]:
    """The gradients of fake_quantize with a learned scale: of x, and of the scale.

    The second is the sum of grad * d, in the order of sum_in_blocks over the elements that share the scale, with
    d = rint(v) - v, v = x * recip, where x is not clipped, qmin - zero_point or qmax - zero_point where it is, 0 for
    NaN. Source: Esser et al., "Learned Step Size Quantization", arXiv 1902.08153, equation 3; docs/numerics.md 10.4.
    """
    v, rounded, low, high = _steps(x, scale, zero_point, granularity, group_size, qmin, qmax)
    inside = (rounded >= low) & (rounded <= high)
    clipped = torch.where(rounded.isnan(), 0.0, torch.minimum(torch.maximum(rounded, low), high))
    slope = torch.where(inside, rounded - v, clipped)
    grad_scale = sum_in_blocks(_grouped(grad.to(torch.float32), granularity, group_size) * slope).reshape(scale.shape)
    grad_x = torch.where(inside.reshape(x.shape), grad, 0.0).contiguous()
    return grad_x, grad_scale
