"""The improvers of the float model by name, for a model in files; each leaves a float model in files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from pyquant.ptq.shards.floats import Floats, Run
from pyquant.ptq.shards.rotated import rotated
from pyquant.ptq.shards.scaled import equalized, smoothed
from pyquant.ptq.shards.searched import searched

# in the order of pyquant.ptq.improve.steps
STEPS: Final[dict[str, Callable[[Floats, Run], Floats]]] = {
    "equalize": equalized,
    "smooth": smoothed,
    "search_scales": searched,
    "rotate": rotated,
    "rotate_online": partial(rotated, online=True),
}


def improved_before(names: tuple[str, ...], floats: Floats, run: Run) -> Floats:
    """What steps.improve_before does to the float model."""
    for name, step in STEPS.items():
        if name in names:
            floats = step(floats, run)
    return floats
