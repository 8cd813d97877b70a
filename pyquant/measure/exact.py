"""Whether a layer returns the bits of its specification, on rows spread over the batch."""

from __future__ import annotations

import copy

import torch

from pyquant.nn.qlinear import QLinear

_CHECK_ROWS = 8


def is_exact(layer: QLinear, x: torch.Tensor) -> bool:
    """Whether up to eight rows of layer(x), the whole batch computed, have the specification's bits.

    Rows are independent, so the reference is computed for the checked rows alone, first and last among them, and on the
    CPU whatever the device.
    """
    with torch.inference_mode():
        y = layer(x)
        rows = check_rows(x.shape[0])
        judge = layer if x.device.type == "cpu" else copy.deepcopy(layer).cpu()
        reference = judge.reference(x[rows].cpu())
    return torch.equal(y[rows].cpu(), reference)


def check_rows(m: int) -> list[int]:
    """Up to eight row numbers of [0, m), spread evenly, first and last among them."""
    if m <= _CHECK_ROWS:
        return list(range(m))
    return sorted({round(i * (m - 1) / (_CHECK_ROWS - 1)) for i in range(_CHECK_ROWS)})
