"""What every simulating layer has: fake quantisers, their calibration, the codes that they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.calibrate import weight_qparams
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn.weights import check_finite, check_group_size
from pyquant.simulate.fake_quantize import FakeQuantize

TENSORS = ("weight", "input", "output")


class Simulated(nn.Module):
    """What every simulating layer offers; `forward` is that of its float class, from_float(layer, scheme) makes one
    around a float layer's parameters."""

    scheme: QScheme
    note: str = ""  # why the layer has another scheme than it was given, as LinearState.note
    ptq_only = False  # the recipe that made it wants no training; prepare_qat_ refuses

    def fake_quantizers(self) -> dict[str, FakeQuantize]:
        """Every FakeQuantize by the name of its tensor: 'weight', 'input', 'output'."""
        fakes = {tensor: getattr(self, f"{tensor}_fake_quant", None) for tensor in TENSORS}
        return {tensor: fake for tensor, fake in fakes.items() if fake is not None}

    def to_quantized(self) -> nn.Module:
        """The layer that runs in integers. Raises ArgumentError where a static range was never calibrated."""
        raise NotImplementedError

    def to_float(self) -> nn.Module:
        """The float layer again, around the same parameters."""
        raise NotImplementedError


class SimulatedLayer(Simulated):
    """Mixed into a float layer class with weights; from_float calls _simulate once the float parameters are there. A
    FakeQuantize for the weights as the matrix [N, K], and for inputs and outputs where the scheme has any."""

    weight: Any  # Tensor and Tensor or None: each float class declares its own
    bias: Any
    weight_fake_quant: FakeQuantize
    input_fake_quant: FakeQuantize | None
    output_fake_quant: FakeQuantize | None
    originals: Any = None  # Originals, where an improver has replaced the parameters (float_model.py)

    def _simulate(self, scheme: QScheme, matrix: Tensor) -> None:
        """Fake quantisers for a scheme; `matrix` is the weights as [N, K]."""
        if scheme.is_float:
            raise ArgumentError("scheme", str(scheme), "a scheme with 4- or 8-bit weights")
        check_group_size(scheme.weights, matrix.shape[1])
        self.scheme = scheme
        self.weight_fake_quant = fake_quantize_of_weight(matrix, scheme.weights)
        self.input_fake_quant = None if scheme.inputs is None else FakeQuantize(scheme.inputs, device=matrix.device)
        self.output_fake_quant = None if scheme.outputs is None else FakeQuantize(scheme.outputs, device=matrix.device)

    @torch.no_grad()
    def codes_of(self, matrix: Tensor) -> dict[str, Any]:
        """What from_codes takes, where the weights are the matrix [N, K]: codes as in forward, calibrated ranges.
        Raises NonFiniteError: a range that is given makes a code of NaN, too, and nothing would show it."""
        check_finite(matrix.detach())
        s, rows = self.scheme.weights, matrix.shape[0]
        scale, zero_point = self.weight_fake_quant.qparams(matrix)
        granularity = "per_group" if s.group_size else "per_channel"
        if s.granularity == "per_tensor":
            scale = scale.expand(rows).contiguous()
            zero_point = None if zero_point is None else zero_point.expand(rows).contiguous()
        codes = ops.quantize(matrix.detach().float(), scale, zero_point, granularity, s.group_size or 0, *s.code_range)
        ranges: dict[str, Any] = {}
        for name, fake in self.fake_quantizers().items():
            if name != "weight" and not fake.follows:
                ranges[f"{name}_scale"], ranges[f"{name}_zero_point"] = fake.qparams()
        bias = None if self.bias is None else self.bias.detach().to(torch.float32, copy=True)
        numbers = {"codes": codes, "weight_scale": scale, "weight_zero_point": zero_point, "bias": bias, **ranges}
        return {**numbers, "scheme": self.scheme, "dtype": self.weight.dtype}

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        return f"{super().extra_repr()}, scheme={self.scheme}"


def fake_quantize_of_weight(weight: Tensor, scheme: TensorScheme) -> FakeQuantize:
    """Max-calibrated weights follow themselves; every other calibrator, and the search for two-level scales, finds a
    range now, from the weights alone."""
    shape = scheme.scale_shape(weight.shape)
    follows = scheme.calibrator == "max" and not scheme.two_level
    fake = FakeQuantize(scheme, shape, follows=follows, device=weight.device)
    if not fake.follows and scheme.calibrator != "fixed" and not weight.is_meta:
        fake.set_qparams(*weight_qparams(weight.detach(), scheme))
    return fake
