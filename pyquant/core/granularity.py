"""Granularities: how many elements of a tensor share one scale, and the shape of the scales that follows."""

from __future__ import annotations

from collections.abc import Sequence

from pyquant.core.names import GRANULARITIES
from pyquant.errors import ArgumentError


def scale_shape(granularity: str, shape: Sequence[int], group_size: int = 0) -> tuple[int, ...]:
    """Shape of the scales (and zero points) of a tensor.

    granularity  one of pyquant.core.names.GRANULARITIES.
    shape        shape of the tensor, [..., K].
    group_size   positive divisor of K for per_group, else 0.
    ->           per_tensor (1,); per_token and per_channel shape[:-1]; per_group (..., K / group_size).
    Raises ArgumentError for an unknown granularity, a tensor without dimensions (except per_tensor), or a group size
    that does not fit.
    Source: docs/numerics.md 1.

    Example:
        >>> scale_shape("per_token", (2, 5, 64)), scale_shape("per_group", (8, 64), 32), scale_shape("per_tensor", (8,))
        ((2, 5), (8, 2), (1,))
    """
    if granularity not in GRANULARITIES:
        raise ArgumentError("granularity", repr(granularity), " or ".join(map(repr, GRANULARITIES)))
    if granularity != "per_group" and group_size != 0:
        raise ArgumentError("group_size", group_size, f"0 with granularity '{granularity}'")
    if granularity == "per_tensor":
        return (1,)
    if len(shape) == 0:
        raise ArgumentError("shape", tuple(shape), f"at least one dimension with granularity '{granularity}'")
    if granularity != "per_group":
        return tuple(shape[:-1])
    if not 0 < group_size < 2**31 or shape[-1] % group_size != 0:
        raise ArgumentError("group_size", group_size, f"a positive divisor of K = {shape[-1]}")
    return (*shape[:-1], shape[-1] // group_size)
