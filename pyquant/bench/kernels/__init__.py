"""Every candidate of the GPU benchmark, in the order of the report."""

from __future__ import annotations

from collections.abc import Sequence

from pyquant.bench.kernels.adapter import Adapter
from pyquant.bench.kernels.layers import LAYERS
from pyquant.bench.kernels.others import OTHERS
from pyquant.bench.kernels.rows import ROWS
from pyquant.bench.kernels.torch_own import TORCH_OWN
from pyquant.bench.peers import named

ADAPTERS: tuple[Adapter, ...] = (*TORCH_OWN, *OTHERS, *LAYERS, *ROWS)


def find_adapters(texts: Sequence[str]) -> list[Adapter]:
    """The candidates whose names hold one of the texts, upper and lower case alike; an exact name stands for itself.

    Raises ArgumentError for a text that no name holds.
    """
    chosen = named(texts, [a.name for a in ADAPTERS], "candidates")
    return [a for a in ADAPTERS if a.name in chosen]
