"""FakeQuantResidual: a skip branch that is rounded as its codes will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pyquant.calibrate import RangeStatistics
from pyquant.core.scheme import QScheme
from pyquant.nn.chain import QResidual, Residual
from pyquant.simulate.fake_quantize import FakeQuantize, start_calibration

if TYPE_CHECKING:
    from typing_extensions import Self


class FakeQuantResidual(Residual):
    """fake_quantize(x), with the static input scheme of its QScheme; x itself under any other scheme.

    Dynamic schemes and weight-only ones leave the branch alone: a sum gains nothing from a separate scale.
    input_fake_quant   FakeQuantize of the branch, or None.

    Example:
        >>> from pyquant.core.presets import W8A8
        >>> sorted(FakeQuantResidual.from_float(Residual(), W8A8()).fake_quantizers())
        ['input']
    """

    scheme: QScheme
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

    def fake_quantizers(self) -> dict[str, FakeQuantize]:
        """{'input': ...}, or nothing."""
        return {} if self.input_fake_quant is None else {"input": self.input_fake_quant}

    def start_calibration(self) -> dict[str, RangeStatistics]:
        """From here on forward observes the branch; -> its statistics."""
        return start_calibration(self.fake_quantizers())

    def stop_calibration(self) -> None:
        """From here on forward quantises again."""
        for fake in self.fake_quantizers().values():
            fake.stop_calibration()

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
