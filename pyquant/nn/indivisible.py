"""What the length of a layer's rows does to its scheme: groups that do not divide it get one scale a channel, are left
alone, or are an error; sums of integers may be too long."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from torch import nn

from pyquant.core.bounds import k_max, k_max_affine
from pyquant.core.dtypes import INT8, KERNEL_BITS
from pyquant.core.scheme import QScheme
from pyquant.errors import SchemeError

CHOICES: Final = ("per_channel", "skip", "error")


def fitted(scheme: QScheme, module: nn.Module, on_indivisible: str, name: str = "") -> tuple[QScheme | None, str]:
    """The scheme that a layer can have, and what to say of it ('' where it is the given one).

    on_indivisible  'per_channel': one scale an output channel instead of groups; 'skip': None, the layer stays in
                    floating point; 'error': SchemeError.
    name            of the layer, for the error.
    """
    group = scheme.weights.group_size
    if group is None or not isinstance(module, (nn.Linear, nn.Conv2d)):
        return scheme, ""
    k = _columns(module)
    if k % group == 0:
        return scheme, ""
    if on_indivisible == "error":
        argument = f"{name}: group_size" if name else "group_size"
        allowed = f"a divisor of in_features = {k}, or None; or on_indivisible='per_channel' or 'skip'"
        raise SchemeError(argument, group, allowed)
    reason = f"group size {group} does not divide K = {k}"
    if on_indivisible == "skip":
        return None, reason
    whole = replace(scheme.weights, granularity="per_channel", group_size=None, two_level=False)
    return replace(scheme, weights=whole), f"{reason}: one scale a channel"


def overflow(scheme: QScheme, module: nn.Module) -> str:
    """Why no kernel can sum a row's products: K is so large that an int32 accumulator might overflow. '': it cannot,
    or there is no kernel, and what simulates one sums in floating point."""
    inputs, weights = scheme.inputs, scheme.weights
    if inputs is None or inputs.bits not in KERNEL_BITS or not isinstance(module, (nn.Linear, nn.Conv2d)):
        return ""
    k, (low, high), largest = _columns(module), inputs.code_range, weights.product_type.largest
    if weights.two_level:
        largest = INT8.qmax  # steps keep the products of codes so small
    limit = k_max(max(-low, high), largest) if inputs.symmetric else k_max_affine(low, high, largest)
    return f"K = {k} is above {limit}, beyond which an int32 accumulator can overflow" if k > limit else ""


def _columns(module: nn.Linear | nn.Conv2d) -> int:
    """Products that one output sums."""
    if isinstance(module, nn.Linear):
        return module.in_features
    return module.in_channels // module.groups * math.prod(module.kernel_size)
