"""Where layers quantise the rows of a tensor in a graph, and nothing else reads it: what makes it may make codes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pyquant.integrations.compile.graph import call, value_of
from pyquant.integrations.compile.layers import LayerCall

_ops = torch.ops.pyquant


@dataclass(frozen=True)
class Readers:
    """The layers that quantise a node's rows, all by one scheme.

    value    the fake tensor that stands for the node.
    calls    of the layers.
    limits   symmetric, qmin, qmax.
    """

    value: Tensor
    calls: list[LayerCall]
    limits: tuple[bool, int, int]

    def take_codes(self, graph: fx.Graph, before: fx.Node, op: Any, given: tuple[Any, ...]) -> None:
        """Let the layers multiply the codes that `op` makes of `given` and the limits, at `before`."""
        made = call(graph, before, op, (*given, *self.limits))
        codes, scale, zero_point = (call(graph, before, operator.getitem, (made, i)) for i in range(3))
        zeros = None if self.limits[0] else zero_point
        for reader in self.calls:
            now = {**reader.given, "x": codes, "x_scale": scale, "x_zero_point": zeros}
            spec = reader.spec
            if now["out_dtype"] is None and spec is not None and not spec.codes_out:
                now["out_dtype"] = None if self.value.dtype == torch.float32 else self.value.dtype
            reader.node.args, reader.node.kwargs = reader.positional(now), {}


def readers_of(node: fx.Node) -> Readers | None:
    """None: something else reads the node, or layers that quantise it in different ways."""
    calls = [LayerCall.of(user) for user in node.users]
    value = value_of(node)
    found = [reader for reader in calls if reader is not None and _takes_codes(reader, node)]
    if not found or value is None or len(found) != len(calls):
        return None
    limits = {(s.x_symmetric, s.x_qmin, s.x_qmax) for s in (reader.spec for reader in found) if s is not None}
    return Readers(value, found, limits.pop()) if len(limits) == 1 else None


def _takes_codes(reader: LayerCall, node: fx.Node) -> bool:
    if reader.node.target is not _ops.qlinear.default or reader.given["x"] is not node:
        return False
    spec = reader.spec
    is_residual = reader.given["residual"] is node
    return spec is not None and spec.input == "dynamic" and reader.given["x_scale"] is None and not is_residual
