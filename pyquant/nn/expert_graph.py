"""The products of a bank of experts as nodes of a compiled graph, which learns at run time how many rows each has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyquant.nn.expert_kinds import CODES, FLOAT, LINEAR, by_kind, each, kind_of, weight_only_operands
from pyquant.nn.expert_rows import Split, with_codes_of_tokens
from pyquant.nn.linear_call import needs_derivative, operand_of

_ops = torch.ops.pyquant


def are_nodes(layers: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether torch.compile can take the layers' products as nodes, one for the layers of each kind: nobody watches
    their calls, asks for derivatives or casts their inputs."""
    if torch.is_autocast_enabled(x.device.type) or needs_derivative(x, None):
        return False
    if not layers or any(layer.training or kind_of(layer) is None for layer in layers):
        return False
    return not torch.is_grad_enabled() or not any(
        p.requires_grad for layer in layers if type(layer) is nn.Linear for p in layer.parameters()
    )


def multiply(layers: Sequence[Any], x: Tensor, split: Split, rows: Tensor | None = None) -> Tensor:
    """Rows sorted by expert, each through the layer of its expert; zeros for rows of no expert.

    split  whose rows are whose; its counts are not looked at.
    rows   int64: which rows of x are meant, in this order; None: all of them, as they are.
    """
    counts = split.ends.long().diff(prepend=split.ends.new_zeros(1, dtype=torch.int64))
    y: Tensor | None = None  # of the experts so far
    for places in by_kind(layers).values():
        which = [] if len(places) == len(layers) else places
        y = _multiply([layers[place] for place in places], x, counts, rows, which, y)
    return cast(Tensor, y)


def _multiply(
    layers: Sequence[Any], x: Tensor, counts: Tensor, rows: Tensor | None, which: list[int], others: Tensor | None
) -> Tensor:
    """Those of one kind. which: their experts, [] for all; others: what the experts before them gave."""
    first, kind = layers[0], cast(tuple[Any, ...], kind_of(layers[0]))[0]
    last: dict[str, Any] = {"experts": which, "others": others}
    if kind == CODES:
        packed, dtype = [layer._buffers["storage"] for layer in layers], x.dtype
        call = partial(_ops._routed_linear.default, counts=counts, packed=packed, spec=first._spec, out_dtype=dtype)
        return with_codes_of_tokens(partial(call, **last), first, x, rows)
    x = x if rows is None else x[rows]
    if kind == LINEAR:
        weights, biases = [layer.weight for layer in layers], [] if first.bias is None else [m.bias for m in layers]
        return cast(Tensor, _ops._routed_dense.default(x, counts, weights, biases, **last))
    fused = (first.activation, *first.clamp)
    if kind == FLOAT:
        held, biases = [layer._buffers["storage"] for layer in layers], each(layers, "bias_")
        operands = (operand_of(held[0], x), counts, held, biases, *fused, x.dtype)
        return cast(Tensor, _ops._routed_float.default(*operands, **last))
    w = first.scheme.weights
    sizes = (first.out_features, w.bits, w.group_size or 0)
    operands = (x, counts, *weight_only_operands(layers), *sizes, *fused)
    return cast(Tensor, _ops._routed_weight_only.default(*operands, **last))
