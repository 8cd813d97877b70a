"""The rows of a bank of experts: sorted by expert, multiplied by the layers of their experts, and added up again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sorted:
    """The slots (token, j) of a routing, sorted by expert; slots of experts elsewhere come last.

    order   int64 [T * k]: of which slot, counted row by row, is each place.
    counts  how many slots each expert has.
    """

    order: Tensor
    counts: list[int]

    @property
    def present(self) -> int:
        """Slots whose expert is here."""
        return sum(self.counts)

    @staticmethod
    def of(ids: Tensor, experts: int) -> Sorted:
        """ids  int [T, k]. Waits for the device of `ids`, which knows how many rows each expert has."""
        flat = ids.reshape(-1)
        flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
        counts = torch.bincount(flat, minlength=experts + 1)
        return Sorted(flat.argsort(stable=True), counts[:experts].tolist())

    def rows(self, x: Tensor, slots: int) -> Tensor:
        """[present, K]: the token of every slot."""
        return x[self.order[: self.present] // max(slots, 1)]


def multiply(layers: Sequence[nn.Module], x: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows sorted by expert, counts[e] of them for layers[e], each through the layer of its expert."""
    parts, begin = [], 0
    for layer, count in zip(layers, counts, strict=True):
        if count:
            parts.append(layer(x[begin : begin + count]))
            begin += count
    if parts:
        return torch.cat(parts)
    last: Any = layers[-1]
    return x.new_zeros(0, last.out_features)


def added(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """float32 [T, H]: the weighted results of each token, added in the order of its slots.

    y      [S, H]: of the slots order[:S], in this order; slots beyond have no result and add nothing.
    """
    tokens, slots = weights.shape
    present, width = y.shape
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    place = place.view(tokens, slots)
    if present < order.numel():  # an expert elsewhere: a row of zeros stands for its result
        y = torch.cat([y, y.new_zeros(1, width)])
        place = place.clamp(max=present)
    total = torch.zeros(tokens, width, dtype=torch.float32, device=y.device)
    for j in range(slots):
        term = y[place[:, j]].float() * weights[:, j, None].float()
        total = term if j == 0 else total + term
    return total
