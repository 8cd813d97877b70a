"""Which float convolutions have an integer twin."""

from __future__ import annotations

import torch
from torch import nn


def unsupported(conv: nn.Conv2d, device: torch.device | None = None) -> str | None:
    """Why a float convolution has no integer twin on a device (None: its own), or None."""
    if conv.groups != 1 and (device or conv.weight.device).type == "cuda":
        return f"groups={conv.groups} on CUDA: integer kernels for groups are those of CPUs"
    if conv.padding_mode != "zeros":
        return f"padding_mode='{conv.padding_mode}'"
    return None
