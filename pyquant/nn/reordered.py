"""Reordered: a quantised layer whose columns stand in the order of their groups, not of its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.dtypes import describe
from pyquant.errors import ArgumentError
from pyquant.nn import foreign_saves
from pyquant.nn.nested import each_token
from pyquant.nn.qlinear import QLinear


class Reordered(nn.Module):
    """y = linear(x[..., order]): what a checkpoint with `desc_act` or `actorder` becomes.

    linear  QLinear (or nn.Linear) whose column j multiplies input order[j].
    order   int64 [K], every number from 0 to K - 1 once.

    A scale that is taken over a whole token or tensor is the same in any order, so activations have the codes that they
    would have without. Raises ArgumentError for what is no order of the layer's inputs.

    Example:
        >>> linear = nn.Linear(3, 2)
        >>> layer = Reordered(linear, torch.tensor([2, 0, 1]))
        >>> torch.equal(layer(torch.eye(3)), linear(torch.eye(3)[:, [2, 0, 1]]))
        True
    """

    order: Tensor

    def __init__(self, linear: nn.Linear | QLinear, order: Tensor) -> None:
        super().__init__()
        check_order(order, linear.in_features)
        self.in_features, self.out_features, self.linear = linear.in_features, linear.out_features, linear
        self.register_buffer("order", order.detach().clone())

    def forward(self, x: Tensor | None = None, residual: Tensor | None = None, *, input: Tensor | None = None) -> Any:
        """The layer. x  float [..., in_features]; residual and input as in QLinear. Raises as QLinear does."""
        x = arguments.x_or_input(x, input)
        if x is None:
            raise ArgumentError("x", "None", f"a float tensor [..., {self.in_features}]")
        if x.is_nested:
            return each_token(self, x, residual)
        taken = x.index_select(-1, self.order)
        return self.linear(taken) if residual is None else self.linear(taken, residual)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        foreign_saves.refuse(prefix, foreign_saves.TURNED)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features] that multiplies x itself, computed at each use."""
        real = self.linear.to_float().weight if isinstance(self.linear, QLinear) else self.linear.weight
        return real.detach().index_select(1, torch.argsort(self.order))

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer inside."""
        return self.linear.bias


def check_order(order: object, columns: int) -> None:
    """Raise ArgumentError for what is no order of so many columns."""
    is_order = isinstance(order, Tensor) and order.dtype == torch.int64 and tuple(order.shape) == (columns,)
    if not is_order or not torch.equal(torch.sort(order.cpu())[0], torch.arange(columns, device="cpu")):  # type: ignore[attr-defined]
        raise ArgumentError("order", describe(order), f"int64 [{columns}], each of 0 to {columns - 1} once")
