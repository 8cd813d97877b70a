"""The weight layout blocked128: a bijection onto its blocks, the same on host and device, tails of zero codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_device import SENTINEL, Memory
from torch import Tensor

from pyquant.numerics.pack import pack_int4

SHAPES = ((128, 128), (1, 1), (3, 5), (64, 96), (129, 130), (200, 257), (256, 384))


def expected(codes: Tensor) -> Tensor:
    """The layout by its formula (docs/kernels.md), from codes [n, k]."""
    n, k = codes.shape
    rows, depth = -(-n // 128), -(-k // 128)
    padded = torch.zeros(rows * 128, depth * 128, dtype=torch.int32)
    padded[:n, :k] = codes
    # channel = block, half, warp, upper, g; k = block, half, word, t, byte
    axes = padded.reshape(rows, 2, 4, 2, 8, depth, 2, 4, 4, 4)
    r, half, warp, upper, g, d, k_half, word, t, byte = range(10)
    nibbles = axes.permute(r, d, half, k_half, warp, g, t, word, byte, upper).reshape(-1, 2) & 15
    return (nibbles[:, 0] | nibbles[:, 1] << 4).to(torch.uint8)


def natural(codes: Tensor, ldw: int) -> Tensor:
    packed = pack_int4(codes)
    wide = torch.full((codes.shape[0], ldw // 2), 0xA7, dtype=torch.uint8)
    wide[:, : packed.shape[1]] = packed
    if codes.shape[1] % 2:  # the nibble after an odd row is junk too
        wide[:, packed.shape[1] - 1] |= 0x70
    return wide


def _codes(n: int, k: int) -> Tensor:
    return torch.randint(-8, 8, (n, k), generator=torch.Generator().manual_seed(n * 1000 + k), dtype=torch.int8)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("gap", [0, 6])
def test_pack_and_unpack_on_the_host(native: Any, n: int, k: int, gap: int) -> None:
    codes, ldw = _codes(n, k), (k + 1) // 2 * 2 + gap
    w = natural(codes, ldw)
    blocked = torch.full((native.blocked128_bytes(n, k) + 1,), SENTINEL, dtype=torch.uint8)
    native.pack_blocked128(w.data_ptr(), n, k, ldw, blocked.data_ptr(), device=None)
    assert blocked[-1] == SENTINEL
    assert torch.equal(blocked[:-1], expected(codes))
    back = torch.full((n, ldw // 2), SENTINEL, dtype=torch.uint8)
    native.unpack_blocked128(blocked.data_ptr(), n, k, ldw, back.data_ptr(), device=None)
    width = (k + 1) // 2
    assert torch.equal(back[:, :width], pack_int4(codes))
    assert bool((back[:, width:] == SENTINEL).all())


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_device_packs_the_same_bytes(native: Any, device: Memory, n: int, k: int) -> None:
    codes, ldw = _codes(n, k), (k + 1) // 2 * 2 + 4
    nbytes = native.blocked128_bytes(n, k)
    blocked = device.put(torch.full((nbytes,), SENTINEL, dtype=torch.uint8))
    native.pack_blocked128(device.put(natural(codes, ldw)), n, k, ldw, blocked)
    assert torch.equal(device.get(blocked, nbytes), expected(codes))
    back = device.put(torch.full((n, ldw // 2), SENTINEL, dtype=torch.uint8))
    native.unpack_blocked128(blocked, n, k, ldw, back)
    got = device.get(back, n * ldw // 2).reshape(n, ldw // 2)
    width = (k + 1) // 2
    assert torch.equal(got[:, :width], pack_int4(codes))
    assert bool((got[:, width:] == SENTINEL).all())


def test_nothing_needs_nothing(native: Any) -> None:
    assert native.blocked128_bytes(0, 128) == native.blocked128_bytes(128, 0) == 0
    assert native.blocked128_bytes(1, 1) == native.blocked128_bytes(128, 128) == 8192
    assert native.blocked128_bytes(129, 257) == 2 * 3 * 8192
