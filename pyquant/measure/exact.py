"""Whether results are right: the bits of a layer's specification, and signal to noise, on rows spread over a batch."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from pyquant.nn.qlinear import QLinear


def is_exact(layer: QLinear, x: Tensor) -> bool:
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


def check_rows(m: int, most: int = 8) -> Tensor:
    """Up to `most` row numbers of [0, m), spread evenly, first and last among them; int64."""
    if m <= most:
        return torch.arange(m, device="cpu")
    return torch.linspace(0, m - 1, most, dtype=torch.float32, device="cpu").round().to(torch.int64)


def sqnr_db(exact: Tensor, y: Tensor) -> float:
    """Signal to noise of y against the exact numbers, both of one shape: inf where they are equal, -inf for a NaN.

    Example:
        >>> round(sqnr_db(torch.ones(4), 1.1 * torch.ones(4)), 3)
        20.0
    """
    exact = exact.double()
    signal, noise = float(exact.square().sum()), float((y.double() - exact).square().sum())
    if math.isnan(noise):
        return -math.inf
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)
