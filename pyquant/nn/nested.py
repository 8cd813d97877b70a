"""Layers on nested tensors, batches of sequences of different lengths without padding: all their tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyquant.core.dtypes import describe
from pyquant.errors import ArgumentError


def each_token(layer: Callable[..., Any], x: Tensor, residual: Tensor | None = None) -> Tensor:
    """What a layer gives for a nested x: a nested tensor of the same lengths.

    layer     what a Linear, a lookup or a fake quantiser does to rows of tokens, of any shape in front.
    x         [batch, lengths, ...], jagged (torch.jagged: all tokens in one call) or of strided pieces (one call each).
    residual  None: a dense one would have no lengths, and of nested ones torch adds.
    Raises ArgumentError for a residual, lengths in another dimension, and layers that give codes.
    """
    if residual is not None:
        raise ArgumentError("residual", describe(residual), "None where x is a nested tensor; add it afterwards")
    if x.layout != torch.jagged:
        return torch.nested.as_nested_tensor([_numbers(layer(one)) for one in x.unbind()])
    jagged: Any = x  # a class of torch's own, which it does not name
    if jagged._ragged_idx != 1:
        allowed = "[batch, lengths, ..., in_features], as torch's Linear takes it"
        raise ArgumentError("x", f"a nested tensor with lengths in dimension {jagged._ragged_idx}", allowed)
    return torch.nested.nested_tensor_from_jagged(
        _numbers(layer(jagged.values())),
        offsets=jagged.offsets(),
        lengths=jagged.lengths(),
        min_seqlen=jagged._maybe_min_seqlen,
        max_seqlen=jagged._maybe_max_seqlen,
    )


def tokens_of(x: Tensor) -> Tensor:
    """x, or the rows that a layer multiplies of a nested one: [all tokens, ...]."""
    if not x.is_nested:
        return x
    return x.values() if x.layout == torch.jagged else torch.cat(x.unbind())


def _numbers(y: Any) -> Tensor:
    if not isinstance(y, Tensor):
        raise ArgumentError("x", "a nested tensor", "a dense one, for a layer that gives codes")
    return y
