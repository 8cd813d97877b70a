"""FakeQuantLinear: a float Linear that rounds weights and inputs as its integer twin will."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant import ops
from pyquant.calibrate import RangeStatistics, weight_range
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn.qlinear import QLinear
from pyquant.nn.weights import check_group_size, scale_shape
from pyquant.simulate.fake_quantize import FakeQuantize, start_calibration

if TYPE_CHECKING:
    from typing_extensions import Self


class FakeQuantLinear(nn.Linear):
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

    scheme: QScheme
    weight_fake_quant: FakeQuantize
    input_fake_quant: FakeQuantize | None
    output_fake_quant: FakeQuantize | None

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
        layer._set_scheme(scheme)
        return layer.train(linear.training)

    def _set_scheme(self, scheme: QScheme) -> None:
        check_group_size(scheme.weights, self.in_features)
        device = self.weight.device
        self.scheme = scheme
        self.weight_fake_quant = fake_quantize_of_weight(self.weight, scheme.weights)
        self.input_fake_quant = None if scheme.inputs is None else FakeQuantize(scheme.inputs, device=device)
        self.output_fake_quant = None if scheme.outputs is None else FakeQuantize(scheme.outputs, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x float [..., in_features] -> float [..., out_features]."""
        if self.input_fake_quant is not None:
            x = self.input_fake_quant(x)
        y = F.linear(x, self.weight_fake_quant(self.weight), self.bias)
        return y if self.output_fake_quant is None else self.output_fake_quant(y)

    def fake_quantizers(self) -> dict[str, FakeQuantize]:
        """Every FakeQuantize by the name of its tensor: 'weight', 'input', 'output'."""
        found = {"weight": self.weight_fake_quant, "input": self.input_fake_quant, "output": self.output_fake_quant}
        return {name: fake for name, fake in found.items() if fake is not None}

    def start_calibration(self) -> dict[str, RangeStatistics]:
        """From here on forward observes its static inputs and outputs; -> their statistics by the tensor's name."""
        return start_calibration(self.fake_quantizers())

    def stop_calibration(self) -> None:
        """From here on forward quantises again."""
        for fake in self.fake_quantizers().values():
            fake.stop_calibration()

    @torch.no_grad()
    def to_quantized(self) -> QLinear:
        """The integer layer: codes of the weights as forward rounds them, calibrated ranges of input and output.

        Raises ArgumentError where a static range was never calibrated.
        """
        return QLinear.from_codes(**codes_of(self, self.weight)).train(self.training)

    def to_float(self) -> nn.Linear:
        """The plain Linear again, around the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        return f"{super().extra_repr()}, scheme={self.scheme}"


def codes_of(layer: Any, matrix: Tensor) -> dict[str, Any]:
    """What from_codes takes, of a simulating layer whose weights are the matrix [N, K]: the codes of its forward."""
    s, rows = layer.scheme.weights, matrix.shape[0]
    scale, zero_point = layer.weight_fake_quant.qparams(matrix)
    granularity = "per_group" if s.group_size else "per_channel"
    if s.granularity == "per_tensor":
        scale = scale.expand(rows).contiguous()
        zero_point = None if zero_point is None else zero_point.expand(rows).contiguous()
    codes = ops.quantize(matrix.detach().float(), scale, zero_point, granularity, s.group_size or 0, *s.code_range)
    ranges: dict[str, Any] = {}
    for name, fake in (("input", layer.input_fake_quant), ("output", layer.output_fake_quant)):
        if fake is not None and not fake.follows:
            ranges[f"{name}_scale"], ranges[f"{name}_zero_point"] = fake.qparams()
    bias = None if layer.bias is None else layer.bias.detach().to(torch.float32, copy=True)
    numbers = {"codes": codes, "weight_scale": scale, "weight_zero_point": zero_point, "bias": bias, **ranges}
    return {**numbers, "scheme": layer.scheme, "dtype": layer.weight.dtype}


def fake_quantize_of_weight(weight: Tensor, scheme: TensorScheme) -> FakeQuantize:
    """Max-calibrated weights follow themselves; every other calibrator finds a range now, from the weights alone."""
    shape = (1,) if scheme.granularity == "per_tensor" else tuple(scale_shape(scheme, *weight.shape))
    fake = FakeQuantize(scheme, shape, follows=scheme.calibrator == "max", device=weight.device)
    if not fake.follows and scheme.calibrator != "fixed" and not weight.is_meta:
        fake.set_range(weight_range(weight.detach(), scheme))
    return fake
