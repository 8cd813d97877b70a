"""The products of a bank of experts as nodes of a compiled graph, which learns at run time how many rows each has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyquant.nn.expert_rows import Split, with_codes_of_tokens
from pyquant.nn.linear_call import needs_derivative
from pyquant.nn.obstacles import is_watched
from pyquant.nn.qlinear import QLinear

_ops = torch.ops.pyquant


def is_node(layers: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether torch.compile can take the layers' products as one node: they are quantised alike, nobody watches their
    calls, asks for derivatives or casts their inputs."""
    if torch.is_autocast_enabled(x.device.type) or needs_derivative(x, None):
        return False
    first = layers[0] if layers else None
    if not isinstance(first, QLinear) or first.training:
        return False
    if not first._is_direct and first.scheme.is_integer:
        return False
    return all(type(m) is QLinear and _alike(m, first) and not is_watched(m) for m in layers)


def _alike(layer: QLinear, first: QLinear) -> bool:
    if first._is_direct:
        return layer._is_direct and layer._spec == first._spec
    said = (first.scheme, first.activation, first.clamp, first.missing, first.bias_ is None)
    return said == (layer.scheme, layer.activation, layer.clamp, layer.missing, layer.bias_ is None)


def multiply(layers: Sequence[Any], x: Tensor, split: Split, rows: Tensor | None = None) -> Tensor:
    """Rows sorted by expert, each through the layer of its expert; zeros for rows of no expert.

    split  whose rows are whose; its counts are not looked at.
    rows   int64: which rows of x are meant, in this order; None: all of them, as they are.
    """
    counts = split.ends.long().diff(prepend=split.ends.new_zeros(1, dtype=torch.int64))
    first, held = layers[0], [layer._buffers["storage"] for layer in layers]
    if first._is_direct:
        call = partial(_ops._routed_linear.default, counts=counts, packed=held, spec=first._spec, out_dtype=x.dtype)
        return with_codes_of_tokens(call, first, x, rows)
    x = x if rows is None else x[rows]
    biases, fused = _each(layers, "bias_"), (first.activation, *first.clamp)
    if first.scheme.is_float:
        rows_of_type = x.to(held[0].dtype)
        return cast(Tensor, _ops._routed_float.default(rows_of_type, counts, held, biases, *fused, x.dtype))
    w = first.scheme.weights
    scales, zeros = _each(layers, "weight_scale"), _each(layers, "weight_zero_point")
    sizes = (first.out_features, w.bits, w.group_size or 0)
    return cast(Tensor, _ops._routed_weight_only.default(x, counts, held, scales, zeros, biases, *sizes, *fused))


def _each(layers: Sequence[Any], name: str) -> list[Tensor]:
    """[] where the layers have none."""
    return [] if getattr(layers[0], name) is None else [getattr(layer, name) for layer in layers]
