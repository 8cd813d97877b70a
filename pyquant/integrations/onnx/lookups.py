"""QEmbedding as modules of plain tensors, those of subclasses of nn.Embedding with the forward of their class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.integrations.onnx import operators
from pyquant.integrations.onnx.stand_in import StandIn
from pyquant.nn import own_embedding


class Lookup(StandIn):
    """QEmbedding: the rows of the codes, then their scales."""

    operator = "Gather"
    codes: Tensor
    scale: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.dtype = layer.dtype
        self.register_buffer("codes", layer.codes.contiguous())
        self.register_buffer("scale", layer.weight_scale_.detach().reshape(-1, 1).clone())

    def forward(self, x: Tensor) -> Tensor:
        self.is_called = True
        return (F.embedding(x, self.codes).to(torch.float32) * F.embedding(x, self.scale)).to(self.dtype)


class DequantizedLookup(StandIn):
    """QEmbedding behind DequantizeLinear, which TensorRT wants of int8 constants."""

    operator = "DQ Gather"
    codes: Tensor
    scale: Tensor
    zero_points: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.dtype = layer.dtype
        self.register_buffer("codes", layer.codes.contiguous())
        self.register_buffer("scale", layer.weight_scale_.detach().clone())
        self.register_buffer("zero_points", torch.zeros(len(self.scale), dtype=torch.int8, device=self.scale.device))

    def forward(self, x: Tensor) -> Tensor:
        self.is_called = True
        rows = operators.dequantize(self.codes, self.scale, self.zero_points, axis=0)
        return F.embedding(x, rows).to(self.dtype)


def like(layer: Any, form: StandIn) -> StandIn:
    """A form of a look-up whose layer has a class of its own: one of that class, which runs the class's forward."""
    kind = own_embedding.kind_of(layer)
    if kind is nn.Embedding:
        return form
    rows = type(f"{kind.__name__}Rows", (type(form), nn.Embedding), {})
    made: StandIn = StandIn.__new__(type(kind.__name__, (kind, rows), {}))
    made.__dict__.update(own_embedding.attributes(layer, form))
    return made
