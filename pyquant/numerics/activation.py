"""The activations of the epilogue: all that Python knows of each, in one table, and the formulas in float32.

Formulas have the bits of csrc/core/activation_math.h, operation by operation. Error bounds, special values and the
origin of the constants: docs/activations.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.errors import ArgumentError
from pyquant.numerics.fp32 import fma
from pyquant.numerics.qparams import as_float32

# Every number is exactly the fp32 constant of the same name in the header; tools/fit_activations.py --check compares.
LOG2_E_HIGH: Final = 1.4426950216293335
LOG2_E_LOW: Final = 1.925963033500011e-08
POWER1: Final = 0.3465735912322998
POWER2: Final = 0.12011323869228363
POWER3: Final = 0.027751799672842026
POWER4: Final = 0.004809252917766571
POWER5: Final = 0.0006695403135381639
POWER6: Final = 7.66323137213476e-05
ERF1: Final = -1.151104211807251
ERF2: Final = -0.45922234654426575
ERF3: Final = -0.05242932215332985
ERF4: Final = 0.006914718542248011
ERF5: Final = 4.2229032260365784e-05
ERF6: Final = -0.00031062873313203454
ERF7: Final = 9.000360296340659e-05
ERF8: Final = -1.4591178114642389e-05
ERF9: Final = 1.4415227269637398e-06
ERF10: Final = -8.060668932330373e-08
ERF11: Final = 1.9526560368632317e-09
TANH1: Final = -1.15110445022583
TANH2: Final = -0.4592161476612091
TANH3: Final = -0.05152962729334831
TANH4: Final = 0.007851400412619114
TANH5: Final = -0.00033757981145754457
TANH6: Final = -0.00018346089927945286
TANH7: Final = -5.746431270381436e-05
TANH8: Final = -0.000156531241373159
TANH9: Final = 0.00011965117300860584
TANH10: Final = -3.515528442221694e-05
TANH11: Final = 5.3251728786563035e-06
TANH12: Final = -4.1745803969206463e-07
TANH13: Final = 1.3489595218629802e-08
_POWER: Final = (POWER6, POWER5, POWER4, POWER3, POWER2, POWER1, 0.5)
_ERF: Final = (ERF11, ERF10, ERF9, ERF8, ERF7, ERF6, ERF5, ERF4, ERF3, ERF2, ERF1)
_TANH: Final = (TANH13, TANH12, TANH11, TANH10, TANH9, TANH8, TANH7, TANH6, TANH5, TANH4, TANH3, TANH2, TANH1)

_ROUND_TO_INTEGER: Final = 12582912.0

_ERF_LIMIT: Final = 8.0
_TANH_LIMIT: Final = 6.0
_SILU_LIMIT: Final = 86.0

# One call emulates about sixty operations; blocks keep the intermediate tensors in cache.
_BLOCK: Final = 1 << 15


def _by_block(formula: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @wraps(formula)
    def by_block(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise ArgumentError("x", x.dtype, torch.float32)
        flat = x.detach().reshape(-1)
        if flat.numel() <= _BLOCK:
            return formula(flat).reshape(x.shape)
        return torch.cat([formula(block) for block in flat.split(_BLOCK)]).reshape(x.shape)

    return by_block


def _half_power(f: Tensor, shifted: Tensor) -> Tensor:
    """2^(f + n) / 2, shifted = n + _ROUND_TO_INTEGER."""
    value = _polynomial(_POWER, f)
    return (value.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


def _gelu_tail(p: Tensor, a: Tensor) -> Tensor:
    shifted = fma(p, a, _ROUND_TO_INTEGER)
    return _half_power(fma(p, a, -(shifted - _ROUND_TO_INTEGER)), shifted)


def _times_tail(x: Tensor, a: Tensor, limit: float, tail: Tensor) -> Tensor:
    base = torch.where(x < 0, x.new_tensor(-0.0), x)
    return torch.where(a < limit, fma(-a, tail, base), base)


def _polynomial(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """Horner's scheme, each step one fma; highest coefficient first."""
    value = fma(coefficients[0], t, coefficients[1])
    for coefficient in coefficients[2:]:
        value = fma(value, t, coefficient)
    return value


@_by_block
def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)).

    x   float32, any shape.
    ->  float32 of that shape; NaN -> NaN, +inf -> +inf, -inf -> -0.0, -0.0 -> -0.0.
    Raises ArgumentError for another dtype. Source, with bounds of the error: docs/activations.md.

    Example:
        >>> silu(torch.tensor([1.0])).item()
        0.7310585975646973
    """
    a = x.abs()
    shifted = fma(a, -LOG2_E_HIGH, _ROUND_TO_INTEGER)
    n = shifted - _ROUND_TO_INTEGER
    half = _half_power(fma(a, -LOG2_E_LOW, fma(a, -LOG2_E_HIGH, -n)), shifted)
    return _times_tail(x, a, _SILU_LIMIT, half / (0.5 + half))


@_by_block
def gelu_tanh(x: Tensor) -> Tensor:
    """x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form of gelu. Otherwise as silu.

    Example:
        >>> gelu_tanh(torch.tensor([1.0])).item()
        0.8411920070648193
    """
    a = x.abs()
    return _times_tail(x, a, _TANH_LIMIT, _gelu_tail(_polynomial(_TANH, a), a))


@_by_block
def gelu_erf(x: Tensor) -> Tensor:
    """x * Phi(x), Phi the normal distribution function. Otherwise as silu.

    Example:
        >>> gelu_erf(torch.tensor([1.0])).item()
        0.8413447141647339
    """
    a = x.abs()
    return _times_tail(x, a, _ERF_LIMIT, _gelu_tail(_polynomial(_ERF, a), a))


def _relu(t: Tensor) -> Tensor:
    return torch.where(t < 0, as_float32(0.0, t), t)


def _clamp(t: Tensor, clamp_min: float, clamp_max: float) -> Tensor:
    low, high = as_float32(clamp_min, t), as_float32(clamp_max, t)
    t = torch.where(t < low, low, t)
    return torch.where(t > high, high, t)


@dataclass(frozen=True)
class Activation:
    """One activation; those with limits (clamp) take clamp_min and clamp_max as two more arguments of each function.

    formula    float32 -> the bits of the kernels; comparisons leave NaN and -0.0 as they are.
    plain      torch's own function, which has every derivative.
    gradient   grad, what went into the activation -> grad times torch's derivative, in ops that a compiler can trace.
    module     what it is in a float model; without arguments, or with the two limits.
    """

    formula: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    gradient: Callable[..., Tensor]
    module: Callable[..., nn.Module]
    has_limits: bool = False

    def limits(self, clamp_min: float, clamp_max: float) -> tuple[float, ...]:
        """What its functions take after their tensors."""
        return (clamp_min, clamp_max) if self.has_limits else ()


def _gelu(formula: Callable[[Tensor], Tensor], form: str) -> Activation:
    return Activation(
        formula,
        partial(F.gelu, approximate=form),
        lambda grad, t: torch.ops.aten.gelu_backward(grad, t, approximate=form),
        partial(nn.GELU, approximate=form),
    )


# By name, in the order of pyquant.core.names.ACTIVATIONS.
ACTIVATIONS: Final[dict[str, Activation]] = {
    "none": Activation(lambda t: t, lambda t: t, lambda grad, t: grad, nn.Identity),
    "relu": Activation(_relu, F.relu, lambda grad, t: grad * (t > 0), nn.ReLU),
    "clamp": Activation(
        _clamp, torch.clamp, lambda grad, t, low, high: grad * ((t >= low) & (t <= high)), nn.Hardtanh, has_limits=True
    ),
    "gelu": _gelu(gelu_erf, "none"),
    "gelu_tanh": _gelu(gelu_tanh, "tanh"),
    "silu": Activation(silu, F.silu, torch.ops.aten.silu_backward, nn.SiLU),
}
