"""Layers whose rows the group size of their scheme does not divide: one scale a channel, left alone, or an error."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from torch import nn

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
    k = (
        module.in_features
        if isinstance(module, nn.Linear)
        else module.in_channels // module.groups * math.prod(module.kernel_size)
    )
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
