"""gelu and silu in float32, the same bits as csrc/core/activation_math.h, operation by operation.

Error bounds, special values and the origin of the constants: docs/activations.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from pyquant.errors import ArgumentError
from pyquant.numerics.fp32 import fma

# Every number is exactly the fp32 constant of the same name in the header; tools/fit_activations.py --check compares.
LOG2_E: Final = 1.4426950216293335
LN2_HIGH: Final = 0.6931471824645996
LN2_LOW: Final = -1.9046542121259336e-09
TANH_SLOPE_HIGH: Final = 1.595768928527832
TANH_SLOPE_LOW: Final = 1.930778950054446e-07
TANH_CUBIC_HIGH: Final = 0.07135481387376785
TANH_CUBIC_LOW: Final = 2.3988324659995897e-09
EXP2: Final = 0.4999999403953552
EXP3: Final = 0.1666652113199234
EXP4: Final = 0.041668280959129333
EXP5: Final = 0.008368690498173237
EXP6: Final = 0.0013819490559399128
ERF0_HIGH: Final = 0.4956558644771576
ERF0_LOW: Final = 2.6635023075982645e-09
ERF1: Final = -0.13930289447307587
ERF2: Final = 0.04509441554546356
ERF3: Final = 0.010673071257770061
ERF4: Final = -0.02448117919266224
ERF5: Final = 0.01581730507314205
ERF6: Final = -0.00487702339887619
ERF7: Final = -0.00014298238966148347
ERF8: Final = 0.0006468589999713004
ERF9: Final = -7.478651968995109e-05
ERF10: Final = -6.922489410499111e-05
_EXP: Final = (EXP6, EXP5, EXP4, EXP3, EXP2)
_ERF: Final = (ERF10, ERF9, ERF8, ERF7, ERF6, ERF5, ERF4, ERF3, ERF2, ERF1, ERF0_LOW)

_ROUND_TO_INTEGER: Final = 12582912.0
_TWO_36: Final = 2.0**36
_TWO_100: Final = 2.0**100
_TWO_MINUS_100: Final = 2.0**-100

_ERF_LIMIT: Final = 14.5
_TANH_LIMIT: Final = 12.0
_SILU_LIMIT: Final = 120.0

# One call emulates about a hundred operations; blocks keep the intermediate tensors in cache.
_BLOCK: Final = 1 << 15


class _ScaledPair(NamedTuple):
    """(high + low) * 2^-100 * scaled_power."""

    high: Tensor
    low: Tensor
    scaled_power: Tensor


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) within one ulp.

    x  float32, any shape.
    Returns float32 of that shape; NaN -> NaN, +inf -> +inf, -inf -> -0.0, -0.0 -> -0.0.
    Raises ArgumentError for another dtype.
    Source: docs/activations.md; csrc/core/activation_math.h.

    Example:
        >>> silu(torch.tensor([1.0])).item()
        0.7310585975646973
    """
    return _by_block(_silu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), within one ulp: the tanh form of gelu.

    x  float32, any shape.
    Returns float32 of that shape; NaN -> NaN, +inf -> +inf, -inf -> -0.0, -0.0 -> -0.0.
    Raises ArgumentError for another dtype.
    Source: docs/activations.md; csrc/core/activation_math.h.

    Example:
        >>> gelu_tanh(torch.tensor([1.0])).item()
        0.8411920070648193
    """
    return _by_block(_gelu_tanh, x)


def gelu_erf(x: Tensor) -> Tensor:
    """x * Phi(x), Phi the normal distribution function, within one ulp.

    x  float32, any shape.
    Returns float32 of that shape; NaN -> NaN, +inf -> +inf, -inf -> -0.0, -0.0 -> -0.0.
    Raises ArgumentError for another dtype.
    Source: docs/activations.md; csrc/core/activation_math.h.

    Example:
        >>> gelu_erf(torch.tensor([1.0])).item()
        0.8413447737693787
    """
    return _by_block(_gelu_erf, x)


def _by_block(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise ArgumentError("x", x.dtype, torch.float32)
    flat = x.detach().reshape(-1)
    if flat.numel() <= _BLOCK:
        return function(flat).reshape(x.shape)
    blocks = [function(flat[start : start + _BLOCK]) for start in range(0, flat.numel(), _BLOCK)]
    return torch.cat(blocks).reshape(x.shape)


def _exp_negative(z_high: Tensor, z_low: Tensor) -> _ScaledPair:
    shifted = fma(z_high, -LOG2_E, _ROUND_TO_INTEGER)
    n = shifted - _ROUND_TO_INTEGER
    r = fma(n, -LN2_HIGH, -z_high)
    r_low = fma(n, -LN2_LOW, -z_low)
    curved = r * r * _polynomial(_EXP, r)
    u = r + curved
    u_low = (r - u) + curved
    high = 1.0 + u
    low = fma(r_low, high, ((1.0 - high) + u) + u_low)
    return _ScaledPair(high, low, ((shifted.view(torch.int32) + 227) << 23).view(torch.float32))


def _divide(numerator: _ScaledPair, divisor_high: Tensor, divisor_low: Tensor, recip: Tensor) -> _ScaledPair:
    high = numerator.high * recip
    rest = fma(-high, divisor_low, fma(-high, divisor_high, numerator.high) + numerator.low)
    return _ScaledPair(high, rest * recip, numerator.scaled_power)


def _capped_power(value: _ScaledPair) -> Tensor:
    power = value.scaled_power
    return torch.where(power > _TWO_36, power, power.new_tensor(_TWO_36)) * _TWO_MINUS_100


def _logistic_tail(z_high: Tensor, z_low: Tensor) -> _ScaledPair:
    e = _exp_negative(z_high, z_low)
    power = _capped_power(e)
    e_high = e.high * power
    divisor = 1.0 + e_high
    divisor_low = fma(e.low, power, (1.0 - divisor) + e_high)
    return _divide(e, divisor, divisor_low, torch.ones_like(divisor) / divisor)


def _times_tail(x: Tensor, a: Tensor, limit: float, tail: _ScaledPair) -> Tensor:
    zero = x.new_zeros(())
    negative = x < 0
    factor = torch.where(negative, a, -(a * _capped_power(tail)))
    base = torch.where(negative, zero, a)
    y = fma(factor, tail.high, base)
    y_low = fma(factor, tail.low, fma(factor, tail.high, base - y))
    total = y + y_low
    power = torch.where(a < limit, tail.scaled_power, zero)
    scaled = total * torch.where(negative, power, x.new_tensor(_TWO_100)) * _TWO_MINUS_100
    signed = (scaled.view(torch.int32) | (x.view(torch.int32) & -(2**31))).view(torch.float32)
    return torch.where(x <= limit, signed, x)


def _clamped_magnitude(x: Tensor, limit: float) -> Tensor:
    a = x.abs()
    return torch.where(a > limit, a.new_tensor(limit), a)


def _polynomial(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """Horner's scheme, each step one fma; highest coefficient first."""
    value = fma(coefficients[0], t, coefficients[1])
    for coefficient in coefficients[2:]:
        value = fma(value, t, coefficient)
    return value


def _silu(x: Tensor) -> Tensor:
    a = _clamped_magnitude(x, _SILU_LIMIT)
    return _times_tail(x, a, _SILU_LIMIT, _logistic_tail(a, torch.zeros_like(a)))


def _gelu_tanh(x: Tensor) -> Tensor:
    a = _clamped_magnitude(x, _TANH_LIMIT)
    square = a * a
    square_low = fma(a, a, -square)
    w = fma(TANH_CUBIC_HIGH, square, TANH_SLOPE_HIGH)
    w_low = fma(TANH_CUBIC_HIGH, square, -(w - TANH_SLOPE_HIGH)) + TANH_SLOPE_LOW
    w_low = fma(TANH_CUBIC_HIGH, square_low, w_low)
    w_low = fma(TANH_CUBIC_LOW, square, w_low)
    z = a * w
    z_low = fma(a, w_low, fma(a, w, -z))
    return _times_tail(x, a, _TANH_LIMIT, _logistic_tail(z, z_low))


def _gelu_erf(x: Tensor) -> Tensor:
    a = _clamped_magnitude(x, _ERF_LIMIT)
    half = a * 0.5
    z = a * half
    e = _exp_negative(z, fma(a, half, -z))
    divisor = a + 1.25
    divisor_low = a - (divisor - 1.25)
    pole = a + 4.0
    both = divisor * pole
    recip_both = torch.ones_like(both) / both
    recip_pole = recip_both * divisor
    zero = a - 4.0
    quotient = zero * recip_pole
    t = fma(fma(-quotient, pole, zero), recip_pole, quotient)
    g = _polynomial(_ERF, t)
    g_high = ERF0_HIGH + g
    g_low = (ERF0_HIGH - g_high) + g
    product = e.high * g_high
    product_low = fma(e.low, g_high, fma(e.high, g_low, fma(e.high, g_high, -product)))
    tail = _divide(_ScaledPair(product, product_low, e.scaled_power), divisor, divisor_low, recip_both * pole)
    return _times_tail(x, a, _ERF_LIMIT, tail)
