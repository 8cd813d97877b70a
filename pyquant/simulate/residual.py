"""FakeQuantResidual: a skip branch that is rounded as its codes will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pyquant.core.scheme import QScheme
from pyquant.nn.chain import QResidual, Residual
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.layer import Simulated

if TYPE_CHECKING:
    from typing_extensions import Self


class FakeQuantResidual(Simulated, Residual):
    """fake_quantize(x), with the static input scheme of its QScheme; x itself under any other: a sum gains nothing
    from a separate scale."""

    input_fake_quant: FakeQuantize | None

    @classmethod
    def from_float(cls, marker: nn.Module, scheme: QScheme) -> Self:
        """The rounding branch in the place of a marker."""
        branch = cls()
        branch.scheme = scheme
        branch.input_fake_quant = FakeQuantize(scheme.inputs) if scheme.is_static and scheme.inputs else None
        return branch.train(marker.training)

    def forward(self, x: Tensor) -> Tensor:
        """x float of any shape -> the same shape and type."""
        fake = self.input_fake_quant
        if fake is None:
            return x
        if fake.scale.device != x.device:  # a marker has no tensor that shows the model's device
            fake.to(x.device)
        y: Tensor = fake(x)
        return y

    @torch.no_grad()
    def to_quantized(self) -> nn.Module:
        """QResidual with the calibrated range; raises ArgumentError where there is none."""
        if self.input_fake_quant is None:
            return self.to_float()
        scale, zero_point = self.input_fake_quant.qparams()
        return QResidual(scale, zero_point, self.input_fake_quant.scheme).train(self.training)

    def to_float(self) -> Residual:
        """The marker again."""
        return Residual().train(self.training)
