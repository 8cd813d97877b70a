"""FakeQuantLinear: a float Linear that rounds weights and inputs as its integer twin will."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn.qlinear import QLinear
from pyquant.simulate.layer import SimulatedLayer

if TYPE_CHECKING:
    from typing_extensions import Self


class FakeQuantLinear(SimulatedLayer, nn.Linear):
    """y = fake_quantize(x) @ fake_quantize(W).T + bias, in floating point.

    Made by from_float; holds the float Linear's own parameters, so that optimisers and tied weights keep working.
    weight_fake_quant   FakeQuantize of the weights [N, K].
    input_fake_quant    FakeQuantize of the inputs, or None for weight-only schemes.
    output_fake_quant   FakeQuantize of the result, or None.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> layer = FakeQuantLinear.from_float(nn.Linear(8, 4), W8A8Dynamic())
        >>> layer.to_quantized().scheme == layer.scheme
        True
    """

    @classmethod
    def from_float(cls, linear: nn.Linear, scheme: QScheme) -> Self:
        """A simulating layer around the parameters of a Linear (shared, not copied).

        linear  nn.Linear, finite weights.
        scheme  integer or weight-only; 16-bit layers have nothing to simulate: ArgumentError.
        """
        if scheme.is_float:
            raise ArgumentError("scheme", str(scheme), "a scheme with 4- or 8-bit weights")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._simulate(scheme, layer.weight)
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x float [..., in_features] -> float [..., out_features]."""
        if self.input_fake_quant is not None:
            x = self.input_fake_quant(x)
        y = F.linear(x, self.weight_fake_quant(self.weight), self.bias)
        return y if self.output_fake_quant is None else self.output_fake_quant(y)

    @torch.no_grad()
    def to_quantized(self) -> QLinear:
        """The integer layer: codes of the weights as forward rounds them, calibrated ranges of input and output.

        Raises ArgumentError where a static range was never calibrated.
        """
        return QLinear.from_codes(**self.codes_of(self.weight)).train(self.training)

    def to_float(self) -> nn.Linear:
        """The plain Linear again, around the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)
