"""Rows of activations that lie in images: a matrix as kernels of convolutions read it."""

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
