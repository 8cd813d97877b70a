"""Tied weights stay tied: layers of one weight whose quantised twins are the same share one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyquant.nn import obstacles


class TiedTwins:
    """The quantised twins of one conversion. Layers of one weight may have twins of their own: by scheme, by range."""

    def __init__(self) -> None:
        self._twins: dict[tuple[type, int, int], list[nn.Module]] = {}

    def shared(self, old: nn.Module, new: nn.Module) -> nn.Module:
        """The twin of a layer: `new`, or the equal one of a layer with the same weight and bias; with hooks its own."""
        weight = getattr(old, "weight", None)
        if weight is None or obstacles.has_hooks(old):
            return new
        twins = self._twins.setdefault((type(old), id(weight), id(getattr(old, "bias", None))), [])
        for twin in twins:
            if _is_same(twin, new):
                return twin
        twins.append(new)
        return new


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two twins of one weight compute the same; repr() shows scheme and geometry."""
    first, second = one.state_dict(), other.state_dict()
    return repr(one) == repr(other) and all(_is_equal(first[name], second.get(name)) for name in first)


def _is_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    return one.is_meta or torch.equal(one, other)
