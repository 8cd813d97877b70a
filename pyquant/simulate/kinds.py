"""Which float modules can be simulated: float class -> simulating class. The one table to extend for a new kind."""

from __future__ import annotations

from typing import Any, Final, TypeGuard

from torch import nn

from pyquant.core.scheme import QScheme
from pyquant.nn.chain import Residual
from pyquant.simulate.conv import FakeQuantConv2d
from pyquant.simulate.layer import Simulated
from pyquant.simulate.linear import FakeQuantLinear
from pyquant.simulate.residual import FakeQuantResidual

SIMULATED: Final[dict[type[nn.Module], Any]] = {
    nn.Linear: FakeQuantLinear,
    nn.Conv2d: FakeQuantConv2d,
    Residual: FakeQuantResidual,
}


def is_simulated(module: object) -> TypeGuard[Simulated]:
    """Whether a module is one of the simulating layers."""
    return isinstance(module, Simulated)


def simulate(module: nn.Module, scheme: QScheme) -> Simulated:
    """The simulating twin of one float module, around its parameters."""
    for kind, twin in SIMULATED.items():
        if isinstance(module, kind) and not is_simulated(module):
            return twin.from_float(module, scheme)
    raise TypeError(f"{type(module).__name__} has no simulating twin")
