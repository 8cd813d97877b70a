"""pyquant in diffusers: models of pipelines that are quantised while they load.

Nothing here imports diffusers before PyquantConfig is asked for. docs/diffusers.md is the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyquant.integrations.diffusers.config import PyquantConfig

__all__ = ["PyquantConfig"]


def __getattr__(name: str) -> Any:
    if name == "PyquantConfig":
        from pyquant.integrations.diffusers.config import PyquantConfig

        return PyquantConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
