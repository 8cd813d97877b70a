"""Largest K for which no int32 accumulator can overflow; csrc/core/bounds.h is its twin (docs/numerics.md 3)."""

from __future__ import annotations

from typing import Final

from pyquant.errors import ArgumentError

INT32_MAX: Final = 2**31 - 1
UNBOUNDED: Final = 2**63 - 1


def k_max(x_abs_max: int, w_abs_max: int) -> int:
    """Largest K with K * x_abs_max * w_abs_max <= 2^31 - 1, UNBOUNDED where one of the two is 0.

    x_abs_max, w_abs_max  largest absolute code of either operand; uint8 codes count as they are (255).

    Example:
        >>> k_max(128, 128), k_max(127, 127), k_max(255, 128)
        (131071, 133144, 65793)
    """
    product = x_abs_max * w_abs_max
    return UNBOUNDED if product == 0 else INT32_MAX // product


def k_max_affine(x_qmin: int, x_qmax: int, w_abs_max: int) -> int:
    """Largest K for which acc - zero_point * w_sum fits too, for every zero point in [x_qmin, x_qmax].

    |x_q - zero_point| never exceeds x_qmax - x_qmin, so that difference takes the place of the largest code.
    """
    return k_max(x_qmax - x_qmin, w_abs_max)


def check_k(
    k: int, x_range: tuple[int, int], w_range: tuple[int, int], *, has_zero_point: bool = False, argument: str = "K"
) -> None:
    """Raise ArgumentError naming `argument`, k and the bound where the accumulator of k products could overflow.

    x_range, w_range  (qmin, qmax) of the activation codes (uint8: (0, 255)) and of the weight codes.
    has_zero_point    the activations carry a zero point, so the corrected accumulator is bounded as well.
    """
    w_abs = max(-w_range[0], w_range[1], 0)
    bound = k_max(max(-x_range[0], x_range[1], 0), w_abs)
    if has_zero_point:
        bound = min(bound, k_max_affine(*x_range, w_abs))
    if not 0 <= k <= bound:
        term = " after the zero-point term" if has_zero_point else ""
        raise ArgumentError(argument, k, f"at most {bound}, beyond which an int32 accumulator{term} can overflow")
