"""int4 weights in the layout blocked128, packed on the host."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from pyquant.numerics.pack import pack_int4


def pack_blocked128(codes: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Codes [n, k] as blocks, and what a problem says of them."""
    native = importlib.import_module("pyquant._native")
    n, k = codes.shape
    packed = pack_int4(codes)
    blocked = torch.empty(native.blocked128_bytes(n, k), dtype=torch.uint8)
    native.pack_blocked128(packed.data_ptr(), n, k, 2 * packed.shape[1], blocked.data_ptr(), device=None)
    return blocked, {"ldw": -(-k // 128) * 128, "w_layout": "blocked128"}
