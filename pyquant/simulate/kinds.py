"""Which float modules can be simulated: float class -> simulating class. The one table to extend for a new kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from torch import Tensor, nn

from pyquant.calibrate import RangeStatistics
from pyquant.core.scheme import QScheme
from pyquant.nn.chain import Residual
from pyquant.simulate.conv import FakeQuantConv2d
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.linear import FakeQuantLinear
from pyquant.simulate.residual import FakeQuantResidual

if TYPE_CHECKING:
    from typing_extensions import Self


class Simulated(Protocol):
    """What every simulating layer offers; `forward` is that of its float class."""

    scheme: QScheme

    @classmethod
    def from_float(cls, module: nn.Module, scheme: QScheme) -> Self:
        """A simulating layer around the parameters of a float one."""

    def fake_quantizers(self) -> dict[str, FakeQuantize]:
        """Its FakeQuantize modules by the name of the tensor."""

    def start_calibration(self) -> dict[str, RangeStatistics]:
        """Observe from here on (pyquant.calibrate.CalibrationTarget)."""

    def stop_calibration(self) -> None:
        """Quantise again from here on."""

    def to_quantized(self) -> nn.Module:
        """The layer that runs in integers."""

    def to_float(self) -> nn.Module:
        """The float layer again."""

    def __call__(self, x: Tensor) -> Tensor: ...


SIMULATED: Final[dict[type[nn.Module], type[nn.Module]]] = {
    nn.Linear: FakeQuantLinear,
    nn.Conv2d: FakeQuantConv2d,
    Residual: FakeQuantResidual,
}


def is_simulated(module: nn.Module) -> bool:
    """Whether a module is one of the simulating layers."""
    return isinstance(module, tuple(SIMULATED.values()))


def simulate(module: nn.Module, scheme: QScheme) -> nn.Module:
    """The simulating twin of one float module, around its parameters."""
    for kind, twin in SIMULATED.items():
        if isinstance(module, kind) and not is_simulated(module):
            return twin.from_float(module, scheme)  # type: ignore[attr-defined,no-any-return]
    raise TypeError(f"{type(module).__name__} has no simulating twin")
