"""Checks of values, not shapes: always for small CPU operands such as scales, on request for everything."""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.core import arguments
from pyquant.core.dtypes import INT4
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


def readable(tensor: Tensor) -> bool:
    """Values can be read without a device synchronisation (or with one that was requested) and outside of tracing."""
    return (
        tensor.layout == torch.strided
        and not torch.compiler.is_compiling()
        and (tensor.device.type == "cpu" or (_enabled and tensor.device.type != "meta"))
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not is_batch(tensor)
    )


def scale_values(argument: str, scale: Tensor | None, allow_nan: bool = False) -> None:
    """Every scale is finite and above zero; NaN is allowed where it marks a poisoned row."""
    if isinstance(scale, Tensor) and scale.is_floating_point() and readable(scale):
        check_scale(argument, scale, allow_nan)


def check_scale(argument: str, scale: Tensor, allow_nan: bool = False) -> None:
    """scale_values of a tensor whose values are there, on any device."""
    good = (scale > 0) & (scale < torch.inf)
    if allow_nan:
        good |= scale.isnan()
    if not bool(good.all()):
        bad = scale.reshape(-1)[(~good).reshape(-1)][0].item()
        raise NonFiniteError(argument, f"a value of {bad}", "finite values above 0")


def finite_values(argument: str, x: Tensor) -> None:
    """With set_checks(True): no NaN, no infinity."""
    if _enabled and isinstance(x, Tensor) and x.is_floating_point() and readable(x) and not bool(x.isfinite().all()):
        index = (~x.isfinite()).nonzero()[0].tolist()
        raise NonFiniteError(argument, f"{x[tuple(index)].item()} at {index}", "finite values (set_checks is on)")


def int4_codes(argument: str, codes: Tensor) -> None:
    """Codes one a byte that fit into four bits."""
    if isinstance(codes, Tensor) and codes.dtype == torch.int8 and codes.numel() and readable(codes):
        low, high = int(codes.min()), int(codes.max())
        if not INT4.holds(low, high):
            raise ArgumentError(argument, f"codes from {low} to {high}", f"codes from {INT4.qmin} to {INT4.qmax}")
