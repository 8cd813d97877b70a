"""Real numbers <-> codes (docs/numerics.md 2.2 and 2.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.core.granularity import scale_shape
from pyquant.numerics.qparams import qparams_from_range, scale_from_amax, scale_recip


def code_from_real(x: Tensor, recip: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """clamp(rint(x * recip) + zero_point, qmin, qmax); NaN gives zero_point.

    x           float32, any shape, real units.
    recip       float32, broadcastable: 1 / scale.
    zero_point  int32, broadcastable, or None for 0.
    ->          int8. Rounding half to even; infinities saturate. The clamp acts before the zero point is added, on
                exact small integers, so that no conversion can overflow.
    Source: docs/numerics.md 2.2.

    Example:
        >>> code_from_real(torch.tensor([0.5, 1.5, -300.0]), torch.tensor(1.0), None, -127, 127).tolist()
        [0, 2, -127]
    """
    v = torch.round(x * recip)
    if zero_point is None:
        return torch.where(v.isnan(), 0.0, v.clamp(qmin, qmax)).to(torch.int8)
    low, high = (qmin - zero_point).to(torch.float32), (qmax - zero_point).to(torch.float32)
    v = torch.minimum(torch.maximum(v, low), high)
    return (torch.where(v.isnan(), 0.0, v).to(torch.int32) + zero_point).to(torch.int8)


def _grouped(x: Tensor, granularity: str, group_size: int) -> Tensor:
    """[..., K] with the elements that share a scale in the last dimension."""
    if granularity == "per_tensor":
        return x.reshape(-1)
    return x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size) if granularity == "per_group" else x


def _spread(qparam: Tensor, granularity: str, shape: tuple[int, ...]) -> Tensor:
    """A scale or zero point, broadcastable to what _grouped gives."""
    return qparam.reshape(()) if granularity == "per_tensor" else qparam.reshape(shape).unsqueeze(-1)


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    qmin: int = -127,
    qmax: int = 127,
) -> Tensor:
    """Codes of a tensor, of any strides, under given scales: clamp(rint(x * (1 / scale)) + zero_point, qmin, qmax).

    Raises ArgumentError for an unknown granularity or a group size that does not fit. Source: docs/numerics.md 2.2.
    """
    shape = scale_shape(granularity, x.shape, group_size)
    recip = _spread(scale_recip(scale), granularity, shape)
    offset = None if zero_point is None else _spread(zero_point, granularity, shape)
    codes = code_from_real(_grouped(x.to(torch.float32), granularity, group_size), recip, offset, qmin, qmax)
    return codes.reshape(x.shape).contiguous()


def quantize_dynamic(
    x: Tensor,
    granularity: str = "per_token",
    group_size: int = 0,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of a tensor, of any strides, under scales made from its own range.

    symmetric  scale = amax / qmax; else the range (widened to contain 0) over qmax - qmin steps.
    ->         elements that share a scale with a NaN or infinity get scale NaN, zero point and codes 0; others are
               untouched. An all-zero range has scale 1; zero points are zeros when symmetric.
    Raises ArgumentError as quantize. Source: docs/numerics.md 2.1, 2.2.
    """
    shape = scale_shape(granularity, x.shape, group_size)
    grouped = _grouped(x.to(torch.float32), granularity, group_size)
    if grouped.shape[-1] == 0:  # torch has no maximum of nothing; here it is zero
        grouped = grouped.new_zeros((*grouped.shape[:-1], 1))
    if symmetric:
        scale = scale_from_amax(grouped.abs().amax(-1), qmax)
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    else:
        scale, zero_point = qparams_from_range(*grouped.aminmax(dim=-1), qmin, qmax)
    scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    codes = quantize(x, scale, None if symmetric else zero_point, granularity, group_size, qmin, qmax)
    return codes, scale, zero_point


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Real numbers of codes: float(q - zero_point) * scale, one float32 product, then one rounding to out_dtype (None:
    it stays float32).

    Raises ArgumentError as quantize. Source: docs/numerics.md 2.3.
    """
    shape = scale_shape(granularity, q.shape, group_size)
    steps = _grouped(q.to(torch.int32), granularity, group_size)
    if zero_point is not None:
        steps = steps - _spread(zero_point, granularity, shape)
    real = steps.to(torch.float32) * _spread(scale, granularity, shape)
    return real.to(out_dtype or torch.float32).reshape(q.shape).contiguous()
