"""Products of rows that are sorted by layer, for compiled graphs: how many rows each layer has is read when they run.

A graph has one node for all layers and a free number of rows for each. These ops are Python on every device, so that
they belong to torch.compile; where the counts are known before, pyquant.nn calls the layers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyquant.errors import ArgumentError
from pyquant.ops.schema import ROUTED, TAGS

_ops = torch.ops.pyquant


def _by_layer(x: Tensor, counts: Tensor, layers: int, out: Tensor, call: Callable[[int, slice], Tensor]) -> Tensor:
    """Fill `out` with call(i, its rows) for every layer that has rows, and with zeros behind them."""
    held, begin = _numbers(x, counts, layers), 0
    for i, count in enumerate(held):
        if count:
            out[begin : begin + count] = call(i, slice(begin, begin + count))
        begin += count
    out[begin:] = 0
    return out


def _numbers(x: Tensor, counts: Tensor, layers: int) -> list[int]:
    """On a GPU this waits for the device, as eager mode does."""
    held: list[int] = counts.tolist()
    if len(held) != layers or min(held, default=0) < 0 or sum(held) > x.shape[0]:
        allowed = f"{layers} numbers from 0, {x.shape[0]} in sum at most"
        raise ArgumentError("counts", f"{held}", allowed)
    return held


def routed_linear(
    x: Tensor,
    counts: Tensor,
    packed: Sequence[Tensor],
    spec: Sequence[int],
    out_dtype: torch.dtype,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
) -> Tensor:
    """qlinear of each layer's rows; on a CPU with the compiled library in one call."""
    per_row = (x_scale, x_zero_point)
    if x.device.type == "cpu" and torch._C._dispatch_has_kernel_for_dispatch_key("pyquant::_grouped_linear", "CPU"):
        _numbers(x, counts, len(packed))
        ends = counts.cumsum(0).to(torch.int32)
        y: Tensor = _ops._grouped_linear.default(x, list(packed), ends, spec, None, *per_row, out_dtype)
        return y
    out = x.new_empty(x.shape[0], spec[0], dtype=out_dtype)

    def call(i: int, rows: slice) -> Tensor:
        given = (None if one is None else one[rows] for one in per_row)
        return _ops.qlinear.default(x[rows], packed[i], None, spec, out_dtype, *given)  # type: ignore[no-any-return]

    return _by_layer(x, counts, len(packed), out, call)


def routed_weight_only(
    x: Tensor,
    counts: Tensor,
    w: Sequence[Tensor],
    w_scale: Sequence[Tensor],
    w_zero_point: Sequence[Tensor],
    bias: Sequence[Tensor],
    n: int,
    w_bits: int,
    group_size: int,
    *fused: Any,
) -> Tensor:
    """weight_only_linear of each layer's rows; no zero points, or no biases: []."""

    def call(i: int, rows: slice) -> Tensor:
        operands = (w[i], w_scale[i], _at(w_zero_point, i), _at(bias, i))
        y: Tensor = _ops.weight_only_linear.default(x[rows], *operands, None, w_bits, group_size, *fused)
        return y

    return _by_layer(x, counts, len(w), x.new_empty(x.shape[0], n), call)


def routed_float(
    x: Tensor, counts: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor], *fused_and_dtype: Any
) -> Tensor:
    """float_linear of each layer's rows; no biases: []."""
    *fused, dtype = fused_and_dtype

    def call(i: int, rows: slice) -> Tensor:
        y: Tensor = _ops.float_linear.default(x[rows], w[i], _at(bias, i), None, *fused, dtype)
        return y

    return _by_layer(x, counts, len(w), x.new_empty(x.shape[0], w[0].shape[0], dtype=dtype), call)


def _at(tensors: Sequence[Tensor], index: int) -> Tensor | None:
    return tensors[index] if tensors else None


def _shape_of_linear(x: Tensor, counts: Tensor, packed: Any, spec: Sequence[int], dtype: Any, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], spec[0], dtype=dtype)


def _shape_of_weight_only(x: Tensor, counts: Tensor, *operands: Any) -> Tensor:
    return x.new_empty(x.shape[0], operands[4])


def _shape_of_float(x: Tensor, counts: Tensor, w: Sequence[Tensor], bias: Any, *fused_and_dtype: Any) -> Tensor:
    return x.new_empty(x.shape[0], w[0].shape[0], dtype=fused_and_dtype[-1])


_SERVED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "_routed_linear": (routed_linear, _shape_of_linear),
    "_routed_weight_only": (routed_weight_only, _shape_of_weight_only),
    "_routed_float": (routed_float, _shape_of_float),
}


def register(library: torch.library.Library) -> None:
    """Define and implement the ops. Their tag keeps CUDA graphs away: no graph can wait for the counts."""
    tags = [getattr(torch.Tag, name) for name in (*TAGS, "cudagraph_unsafe")]
    for name, (kernel, rule) in _SERVED.items():
        library.define(name + ROUTED[name], tags=tags)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pyquant::{name}", rule, lib=library)
