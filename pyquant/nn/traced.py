"""A quantised layer in a graph of torch.fx: one node, whatever the tracer's own idea of leaves."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


def node(layer: nn.Module, x: fx.Proxy, *args: Any) -> fx.Proxy:
    """The call of a layer on a traced value, as a call_module node."""
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), (x, *args), {})  # type: ignore[no-any-return]
