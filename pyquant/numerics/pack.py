"""Codes in the memory of their type: int4 ones lie two per byte (docs/numerics.md 2.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.core.dtypes import CodeType


def pack_int4(q: Tensor) -> Tensor:
    """Two codes per byte along the last dimension, of which only the low four bits are kept: even k in the low nibble,
    odd k in the high one, two's complement; an odd tail has a zero high nibble.
    """
    nibbles = q.contiguous().view(torch.uint8) & 0xF
    if q.shape[-1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: Tensor, k: int) -> Tensor:
    """The inverse of pack_int4 for k codes in the last dimension."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :k]
    return ((nibbles ^ 8).view(torch.int8) - 8).contiguous()


def pack(codes: Tensor, t: CodeType) -> Tensor:
    """int8 codes [..., k] in the memory of their type: t.storage [..., t.columns(k)]."""
    return pack_int4(codes) if t.is_packed else codes


def unpack(memory: Tensor, k: int, t: CodeType) -> Tensor:
    """The inverse of pack."""
    return unpack_int4(memory, k) if t.is_packed else memory
