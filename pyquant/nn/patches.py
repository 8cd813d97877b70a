"""Which float convolutions have an integer twin."""

from __future__ import annotations

from torch import nn


def unsupported(conv: nn.Conv2d) -> str | None:
    """Why a float convolution has no integer twin here, or None."""
    if conv.groups != 1:
        return f"groups={conv.groups}: each group would be a separate product, too small for the integer kernels"
    if conv.padding_mode != "zeros":
        return f"padding_mode='{conv.padding_mode}'"
    return None
