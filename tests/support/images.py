"""Rows of activations that lie in images: a matrix as kernels of convolutions read it, and random windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_images(row: Mapping[str, Any], m: int, k: int, ld: int | None = None) -> dict[str, Any]:
    """What a problem says of x [m, k] (ld codes from row to row) for rows that read images: one image of m pixels and k
    channels, under a window of one pixel. Nothing for all other rows.
    """
    if not row["channel_multiple"]:
        return {}
    ld = k if ld is None else ld
    image = {"channels": k, "taps": 1, "out_height": 1, "out_width": max(m, 1), "image_step": m * ld}
    return {"image": image | {"window_step": [0, ld], "tap_step": [0, 0]}}


def image_rows(patches: Any, height: int, width: int, channels: int) -> dict[str, Any]:
    """The same for padded images [height, width, channels] under the window of a Patches."""
    out_height = (height - patches.dilation[0] * (patches.kernel_size[0] - 1) - 1) // patches.stride[0] + 1
    out_width = (width - patches.dilation[1] * (patches.kernel_size[1] - 1) - 1) // patches.stride[1] + 1
    steps = (width * channels, channels)
    return {
        "channels": channels,
        "taps": patches.kernel_size[1],
        "out_height": out_height,
        "out_width": out_width,
        "image_step": height * width * channels,
        "window_step": [stride * step for stride, step in zip(patches.stride, steps, strict=True)],
        "tap_step": [dilation * step for dilation, step in zip(patches.dilation, steps, strict=True)],
    }
