"""Integer matrix products and their scaling (docs/numerics.md 3 and 4)."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from pyquant.core import dtypes
from pyquant.numerics.epilogue import finish, store
from pyquant.numerics.pack import unpack

_BLOCK_BYTES: Final = 2**24  # a block of widened weights stays in a last-level cache


def integer_matmul(x: Tensor, w: Tensor) -> Tensor:
    """Exact sum_k x[..., k] * w[n, k].

    x   integer codes [..., K]; w integer codes [N, K].
    ->  int64 [..., N]. Products and sums are taken in float64, where every partial sum is an integer below 2^53 in any
        order, for any K that the int32 accumulator allows (docs/numerics.md 3); autocast leaves float64 alone.
    Source: docs/numerics.md 3.

    Example:
        >>> integer_matmul(torch.tensor([[1, -2]]), torch.tensor([[3, 4]])).tolist()
        [[-5]]
    """
    if x.numel() == 0 or w.numel() == 0:
        return torch.zeros((*x.shape[:-1], w.shape[0]), dtype=torch.int64, device=x.device)
    rows = x.reshape(-1, x.shape[-1]).to(torch.float64)
    step = max(1, _BLOCK_BYTES // (8 * w.shape[1]))
    blocks = [torch.mm(rows, block.to(torch.float64).t()).to(torch.int64) for block in torch.split(w, step)]
    return torch.cat(blocks, dim=1).reshape(*x.shape[:-1], w.shape[0])


def is_per_token(x_scale: Tensor, x: Tensor) -> bool:
    """Whether a scale (or zero point) of x [..., K] has one entry per row: its shape is x.shape[:-1], not [].

    Everything else is one number for all rows. With a single row [1, K] a shape of [1] means per token; one number for
    all is then written [] (the two have different roundings, docs/numerics.md 4).

    Example:
        >>> is_per_token(torch.ones(1), torch.ones(1, 8)), is_per_token(torch.tensor(1.0), torch.ones(1, 8))
        (True, False)
    """
    return x_scale.dim() > 0 and x_scale.shape == x.shape[:-1]


def _rows(qparam: Tensor, x: Tensor) -> Tensor:
    return qparam.unsqueeze(-1) if is_per_token(qparam, x) else qparam.reshape(())


def accumulate(x: Tensor, w: Tensor, x_zero_point: Tensor | None = None) -> Tensor:
    """The int32 accumulator after the zero-point term: sum_k (x[..., k] - x_zero_point[...]) * w[n, k].

    x             int8 or uint8 codes [..., K]; uint8 codes and their zero point count as they are (0 when absent).
    w             int8 codes [N, K].
    x_zero_point  int32, one number or one per row, or None for 0.
    ->            int32 [..., N]; wraps if K is beyond the bound.
    Source: docs/numerics.md 3.

    Example:
        >>> accumulate(torch.tensor([[1, -2]]), torch.tensor([[3, 4]]), torch.tensor(1)).tolist()
        [[-12]]
    """
    acc = integer_matmul(x, w)
    if x_zero_point is not None:
        acc = acc - _rows(x_zero_point, x).to(torch.int64) * w.sum(-1, dtype=torch.int64)
    return acc.to(torch.int32)


def _scaled(
    x: Tensor, w: Tensor, w_scale: Tensor | None, x_scale: Tensor | None, x_zero_point: Tensor | None, group_size: int
) -> Tensor:
    """float32 [..., N]: the accumulator times its scales, in the order of docs/numerics.md 4."""
    if group_size and w_scale is not None:
        t = torch.zeros((*x.shape[:-1], w.shape[0]), dtype=torch.float32, device=x.device)
        groups = zip(torch.split(x, group_size, -1), torch.split(w, group_size, -1), strict=True)
        for g, (x_g, w_g) in enumerate(groups):
            if w_g.shape[1]:  # split of K = 0 gives one empty group
                t = t + accumulate(x_g, w_g, x_zero_point).to(torch.float32) * w_scale[:, g]
        return t if x_scale is None else t * _rows(x_scale, x)
    t = accumulate(x, w, x_zero_point).to(torch.float32)
    if x_scale is None or is_per_token(x_scale, x):
        t = t if w_scale is None else t * w_scale
        return t if x_scale is None else t * _rows(x_scale, x)
    return t * (x_scale.reshape(()) if w_scale is None else x_scale.reshape(()) * w_scale)


def gemm(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
    group_size: int = 0,
    activation: str = "none",
    clamp_min: float = 0.0,
    clamp_max: float = 0.0,
    out_qmin: int = -127,
    out_qmax: int = 127,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = epilogue(sum_k x_q * w_q), bit for bit as every kernel gives it.

    Operands and result of ops.gemm_s8s8, but is_per_token says whether x_scale and x_zero_point are one number, and
    out_dtype None is float32, int32 applies nothing but the zero-point term. w_scale None: 1 (the ops take None for
    int32 results only).
    Source: docs/numerics.md 3, 4, 5.

    Example:
        >>> x, w = torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3, 4]], dtype=torch.int8)
        >>> gemm(x, w, torch.tensor([0.5]), bias=torch.tensor([1.0])).tolist()
        [[6.5]]
    """
    if out_dtype == torch.int32:
        return accumulate(x, w, x_zero_point)
    t = _scaled(x, w, w_scale, x_scale, x_zero_point, group_size)
    t = finish(t, bias=bias, residual=residual, activation=activation, clamp_min=clamp_min, clamp_max=clamp_max)
    codes = {"out_scale": out_scale, "out_zero_point": out_zero_point, "out_qmin": out_qmin, "out_qmax": out_qmax}
    return store(t, out_dtype or torch.float32, **codes)  # type: ignore[arg-type]


def product(op: str, x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """gemm of codes as they lie in memory: int4 weights are packed two per byte, int4 activations may be.

    op   a name of pyquant.core.dtypes.PRODUCTS: the types of both. Other arguments and result as gemm.
    """
    x_type, w_type = dtypes.PRODUCTS[op]  # not by name: planted bugs exchange the tables of a module
    if x_type.is_packed and x.dtype == x_type.storage:
        x = unpack(x, x.shape[-1] * x_type.per_element, x_type)
    return gemm(x, unpack(w, x.shape[-1], w_type), *args, **kwargs)


gemm_s8s8, gemm_s8s4, gemm_s4s4 = (partial(product, op) for op in ("gemm_s8s8", "gemm_s8s4", "gemm_s4s4"))
