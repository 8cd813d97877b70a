"""Checks of values, not shapes: always for small CPU operands such as scales, on request for everything."""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.core import arguments
from pyquant.errors import ArgumentError, NonFiniteError

_enabled = False


def set_checks(enabled: bool) -> None:
    """Switch the checks of data on or off (off at start).

    enabled  True: static quantisation of NaN or infinity raises NonFiniteError instead of saturating (NaN becomes the
             zero point otherwise); scales and zero points are checked on CUDA too, at the price of a synchronisation.

    Example:
        >>> set_checks(True); set_checks(False)
    """
    global _enabled
    _enabled = arguments.flag("enabled", enabled)


def checks_enabled() -> bool:
    """Whether set_checks(True) is in effect."""
    return _enabled


def is_batch(tensor: Tensor) -> bool:
    """Whether torch.vmap made the tensor stand for many, at any level: then it has no values to look at."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _readable(tensor: Tensor) -> bool:
    """Values can be read without a device synchronisation (or with one that was requested) and outside of tracing."""
    if (
        tensor.layout != torch.strided
        or torch.compiler.is_compiling()
        or tensor.device.type == "meta"
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or is_batch(tensor)
    ):
        return False
    return tensor.device.type == "cpu" or _enabled


def scale_values(argument: str, scale: Tensor | None, allow_nan: bool = False) -> None:
    """Every scale is finite and above zero; NaN is allowed where it marks a poisoned row."""
    if scale is None or not isinstance(scale, Tensor) or not scale.is_floating_point() or not _readable(scale):
        return
    good = (scale > 0) & (scale < torch.inf)
    if allow_nan:
        good |= scale.isnan()
    if not bool(good.all()):
        bad = scale.reshape(-1)[(~good).reshape(-1)][0].item()
        raise NonFiniteError(argument, f"a value of {bad}", "finite values above 0")


def zero_points(argument: str, zero_point: Tensor | None, low: int, high: int) -> None:
    """Every zero point is one of the codes: beyond them the bounds of docs/numerics.md 3 would not hold.

    The compiled ops look at those on the CPU themselves (csrc/bind/check.h); this is for the fallback, and for other
    devices with set_checks(True).
    """
    if zero_point is None or not isinstance(zero_point, Tensor) or zero_point.dtype != torch.int32:
        return
    if not _readable(zero_point) or zero_point.numel() == 0:
        return
    bad = zero_point.reshape(-1)[((zero_point < low) | (zero_point > high)).reshape(-1)]
    if bad.numel():
        raise ArgumentError(argument, f"a zero point of {int(bad[0])}", f"codes from {low} to {high}")


def finite_values(argument: str, x: Tensor) -> None:
    """With set_checks(True): no NaN, no infinity."""
    if _enabled and isinstance(x, Tensor) and x.is_floating_point() and _readable(x) and not bool(x.isfinite().all()):
        index = (~x.isfinite()).nonzero()[0].tolist()
        raise NonFiniteError(argument, f"{x[tuple(index)].item()} at {index}", "finite values (set_checks is on)")
