"""Which float convolutions have an integer twin."""

from __future__ import annotations

from torch import nn


def unsupported(conv: nn.Conv2d) -> str | None:
    """Why a float convolution has no integer twin, or None."""
    return None if conv.padding_mode == "zeros" else f"padding_mode='{conv.padding_mode}'"
