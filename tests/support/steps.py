"""4-bit weights whose codes have whole-number steps (docs/numerics.md 4.1), as the kernels read them."""

from __future__ import annotations

from typing import Any

import torch
from blocked import pack_blocked128
from problems import Draw
from torch import Tensor

LARGEST = 127  # of a code times its step


def draw_steps(draw: Draw, n: int, k: int, size: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [n, k] of the whole range or the narrow one, and steps uint8 [n, k / size] whose products are int8
    codes; products at both limits are frequent."""
    low = draw.choice((-7, -8))
    top = LARGEST // -low
    codes = draw.codes(low, 7, n, k).to(torch.int8)
    step = torch.where(draw.uniform(n, k // size) < 0.3, top, draw.codes(1, top, n, k // size))
    return codes, step.to(torch.uint8)


def products(codes: Tensor, step: Tensor) -> Tensor:
    """int8 [n, k]: codes times steps."""
    wide = codes.to(torch.int16) * step.to(torch.int16).repeat_interleave(codes.shape[1] // max(step.shape[1], 1), 1)
    assert not wide.numel() or int(wide.abs().max()) <= LARGEST
    return wide.to(torch.int8)


def natural_steps(step: Tensor) -> Tensor:
    """Steps of natural rows, by the formula of csrc/core/steps.h. Steps beyond n are junk."""
    n, groups = step.shape
    rows = torch.full((groups, -(-n // 32) * 32), 0xC5, dtype=torch.uint8)
    for channel in range(n):
        rows[:, channel // 32 * 32 + 4 * (channel % 8) + channel // 8 % 4] = step[channel]
    return rows


def pack_blocked_steps(codes: Tensor, step: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Codes and steps as blocks, and what a problem says of them. Steps beyond n and k are junk."""
    blocked, order = pack_blocked128(codes)
    n, k = codes.shape
    rows, depth = -(-n // 128), -(-k // 128)
    steps = torch.full((rows * depth, 256), 0xC5, dtype=torch.uint8)
    size = k // max(step.shape[1], 1)
    for channel in range(n):
        word = 32 * (channel // 64 % 2) + 8 * (channel // 16 % 4) + channel % 8
        for part in range(-(-k // 64)):
            block = channel // 128 * depth + part // 2
            steps[block, 4 * word + 2 * (part % 2) + channel // 8 % 2] = step[channel, 64 * part // size]
    return torch.cat([blocked.reshape(-1, 8192), steps], 1).reshape(-1), order
