"""The (K, N) of the linear layers of known models, as they run: projections that share an input are one product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pyquant.errors import ArgumentError

KN = tuple[int, int]

MODELS: Final[Mapping[str, tuple[KN, ...]]] = {
    "llama-3-8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "llama-3-70b": ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
    "bert-base": ((768, 768), (768, 3072), (3072, 768)),
    "bert-large": ((1024, 1024), (1024, 4096), (4096, 1024)),
    "vit-b": ((768, 2304), (768, 768), (768, 3072), (3072, 768)),
    "vit-l": ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)),
    # six layers from 32768 features down to 1024 and back, the mixed-precision search's example
    "mlp-6": ((32768, 16384), (16384, 8192), (8192, 4096), (4096, 2048), (2048, 1024), (1024, 32768)),
}
MS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def shapes_of(models: Iterable[str]) -> list[KN]:
    """The distinct (K, N) of models, in table order.

    Raises ArgumentError for a model that is not in MODELS.

    Example:
        >>> shapes_of(["bert-base", "vit-b"])
        [(768, 768), (768, 3072), (3072, 768), (768, 2304)]
    """
    found: dict[KN, None] = {}
    for model in models:
        if model not in MODELS:
            raise ArgumentError("models", repr(model), ", ".join(MODELS))
        found |= dict.fromkeys(MODELS[model])
    return list(found)
