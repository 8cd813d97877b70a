"""Every candidate of the GPU benchmark, in the order of the report."""

from __future__ import annotations

from collections.abc import Sequence

from pyquant.bench.kernels.adapter import Adapter
from pyquant.bench.kernels.layers import LAYERS
from pyquant.bench.kernels.others import OTHERS
from pyquant.bench.kernels.rows import ROWS
from pyquant.bench.kernels.torch_own import TORCH_OWN
from pyquant.errors import ArgumentError

ADAPTERS: tuple[Adapter, ...] = (*TORCH_OWN, *OTHERS, *LAYERS, *ROWS)


def find_adapters(texts: Sequence[str], adapters: Sequence[Adapter] = ADAPTERS) -> list[Adapter]:
    """The candidates whose names hold one of the texts, upper and lower case alike; an exact name stands for itself.

    Raises ArgumentError for a text that no name holds.

    Example:
        >>> [adapter.name for adapter in find_adapters(["mm fp16"])]
        ['torch.mm fp16']
    """
    chosen: dict[str, Adapter] = {}
    for text in texts:
        exact = [a for a in adapters if a.name == text]
        hits = exact or [a for a in adapters if text.lower() in a.name.lower()]
        if not hits:
            raise ArgumentError("candidates", repr(text), "part of one of: " + ", ".join(a.name for a in adapters))
        chosen |= {a.name: a for a in hits}
    return [a for a in adapters if a.name in chosen]
