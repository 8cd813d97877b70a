"""A module through torch.compile, its bits compared and its graphs counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.core.qtensor import QTensor


class Compiled:
    """A module through torch.compile without graph breaks; counts the graphs."""

    def __init__(self, module: nn.Module, fullgraph: bool = True) -> None:
        self.graphs, self.module = 0, module
        self._call = torch.compile(module, fullgraph=fullgraph, dynamic=True, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def check(self, *inputs: Any) -> None:
        """Equal bits."""
        with torch.no_grad():
            got, want = self._call(*inputs), self.module(*inputs)
        for a, b in [(got, want)] if isinstance(got, Tensor) else zip(_tensors(got), _tensors(want), strict=True):
            assert torch.equal(a, b)


def _tensors(value: Any) -> list[Tensor]:
    return [value.data, value.scale] if isinstance(value, QTensor) else list(value)
