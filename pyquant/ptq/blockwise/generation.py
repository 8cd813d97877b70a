"""Models that keep keys and values of earlier tokens for generation: not while they are gone through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """`use_cache` of every configuration in the model (transformers' attribute) is False inside.

    A pass of whole sequences gives the same without it; a block that adds to a cache gives another result when it is
    called again."""
    changed: list[Any] = []
    try:
        for module in model.modules():
            config: Any = module.__dict__.get("config")
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False
                changed.append(config)
        yield
    finally:
        for config in changed:
            config.use_cache = True
