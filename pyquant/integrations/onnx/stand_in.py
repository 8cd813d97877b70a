"""StandIn: what the modules that are exported instead of quantised layers have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing


class StandIn(nn.Module):
    """A module that computes what a quantised layer computes, and shows everything else that the layer shows.

    Models look at their layers: at the type of a weight, at a number of features or rows, and a few multiply by a
    weight themselves. What a form has no attribute for is its layer's.

    is_called, is_read   whether the export came through forward, and whether it asked for the weight.
    """

    operator: str  # what is exported, in a few words
    is_called = False
    is_read = False

    def standing_for(self, layer: nn.Module) -> StandIn:
        """This module, which from now on shows what the layer shows."""
        self.__dict__["_layer"] = layer  # no child: its buffers are no part of the file
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = self.__dict__.get("_layer")
            if layer is None or name.startswith("__"):
                raise
        if name != "weight":
            return getattr(layer, name)
        self.is_read = True
        return _numbers(layer)


def _numbers(layer: Any) -> Tensor:
    """The float weight of a layer, which a graph that is being recorded takes for a constant."""
    with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch.no_grad():
        weight: Tensor = layer.to_float().weight.detach()
        return weight
