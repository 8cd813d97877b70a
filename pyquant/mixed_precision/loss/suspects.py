"""Which groups are sensitive in many models: a first guess that costs nothing."""

from __future__ import annotations

import statistics
from typing import Any, Final

from pyquant.mixed_precision.choices.switchable import SwitchableModel

# Reported again and again for the first and last layers and for bottlenecks; the share is a choice of ours.
_NARROW: Final = 0.25


def usual_suspects(switchable: SwitchableModel) -> dict[str, str]:
    """{group: why} of those that are often sensitive: the first, the last, and narrow bottlenecks.

    A bottleneck has a layer whose narrower side (inputs of a product, outputs) is at most a quarter of the median of
    all layers'. It is a guess to compare measurements with, never used instead of them.
    """
    sides = {
        group.name: min(_narrower(switchable.layer(name, 0)) for name in group.layers) for group in switchable.groups
    }
    median = statistics.median(sides.values())
    names = list(sides)
    suspects: dict[str, str] = {}
    for i, name in enumerate(names):
        reasons = [word for word, at in (("first", 0), ("last", len(names) - 1)) if i == at]
        if sides[name] <= _NARROW * median:
            reasons.append(f"bottleneck of {sides[name]}")
        if reasons:
            suspects[name] = ", ".join(reasons)
    return suspects


def _narrower(layer: Any) -> int:
    rows: int = layer.weight.shape[0]
    return min(rows, layer.weight.numel() // max(1, rows))
