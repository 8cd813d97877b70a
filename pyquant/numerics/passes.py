"""How much of a tensor several operations in a row go over before the next part."""

from __future__ import annotations

from typing import Final

import torch

ON_DEVICES: Final = 1 << 24  # numbers: 64 MiB in float32, at which a launch is lost


def at_once(device: torch.device, cached: int) -> int:
    """Numbers of a part: on a CPU `cached`, which stay in a cache; on a GPU, where each part costs the launches of all
    operations again, as many as memory allows.

    Example:
        >>> at_once(torch.device("cpu"), 1024), at_once(torch.device("cuda"), 1024)
        (1024, 16777216)
    """
    return cached if device.type == "cpu" else max(cached, ON_DEVICES)
