"""Shares of layers that merge_ joined: every rank has one product of its rows of all of them."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.fx import Proxy

from pyquant.core import arguments
from pyquant.integrations.distributed.layer import ColwiseQLinear
from pyquant.nn.linear_state import traced
from pyquant.nn.merged_linear import MergedLinear, register_member
from pyquant.nn.qlinear import QLinear


class ColwiseMergedLinear(ColwiseQLinear, MergedLinear):
    """A ColwiseQLinear whose rows stand in one product with those that this rank has of other layers."""

    alone_kind: ClassVar[type[QLinear]] = ColwiseQLinear

    def forward(self, x: Any = None, residual: Tensor | None = None, *, input: Any = None) -> Any:
        """As ColwiseQLinear.forward. Inputs that ranks must put together first are put together once for all layers of
        the group, where the product is kept for them (MergedLinear)."""
        x = arguments.x_or_input(x, input)
        if isinstance(x, Proxy):
            return traced(self, x, residual)
        if residual is not None:
            return self.alone()(x, residual)
        layouts, group = self._layouts, self._group
        group.whole.training = self.training
        if layouts.is_there(x, Replicate()):
            return self._leave(group.part(layouts.enter(x, Replicate()), self._place))
        key = x.to_local() if isinstance(x, DTensor) else x  # the tensor that a DTensor holds, under torch.no_grad()
        return self._leave(group.part(key, self._place, partial(layouts.enter, x, Replicate())))


register_member(ColwiseMergedLinear)
