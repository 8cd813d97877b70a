"""FakeQuantLinear: a float Linear that rounds weights and inputs as its integer twin will."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.core.scheme import QScheme
from pyquant.nn.qlinear import QLinear
from pyquant.simulate.layer import SimulatedLayer

if TYPE_CHECKING:
    from typing_extensions import Self


class FakeQuantLinear(SimulatedLayer, nn.Linear):
    """y = fake_quantize(x) @ fake_quantize(W).T + bias, in floating point, around the float Linear's own parameters.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> layer = FakeQuantLinear.from_float(nn.Linear(8, 4), W8A8Dynamic())
        >>> layer.to_quantized().scheme == layer.scheme
        True
    """

    @classmethod
    def from_float(cls, linear: nn.Linear, scheme: QScheme) -> Self:
        """A simulating layer around the parameters of a Linear (shared, not copied) with finite weights; not of a
        16-bit scheme, which has nothing to simulate (ArgumentError)."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._simulate(scheme, layer.weight)
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """input float [..., in_features] -> float [..., out_features]."""
        x = input if self.input_fake_quant is None else self.input_fake_quant(input)
        y = F.linear(x, self.weight_fake_quant(self.weight), self.bias)
        return y if self.output_fake_quant is None else self.output_fake_quant(y)

    @torch.no_grad()
    def to_quantized(self) -> QLinear:
        """The integer layer, with the codes of the weights that forward rounds to. ArgumentError: not calibrated."""
        return QLinear.from_codes(**self.codes_of(self.weight)).train(self.training)

    def to_float(self) -> nn.Linear:
        """The plain Linear again, around the same parameters."""
        return plain_linear(self)


def plain_linear(layer: nn.Linear) -> nn.Linear:
    """An nn.Linear around the parameters of a layer derived from it."""
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    linear.weight, linear.bias = layer.weight, layer.bias
    return linear.train(layer.training)
