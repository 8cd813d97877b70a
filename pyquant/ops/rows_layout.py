"""The 'rows' layouts of a packed Linear: rows of codes in 256-byte aligned sections of one byte buffer.

Pure byte plumbing with torch ops, so it serves every device: the CUDA kernels and the Python fallback read it.
csrc/core/rows_layout.h is its twin. K is padded to 32 codes and N to 16 rows with zeros, once, so that no kernel meets
an unaligned tail of the weights.

    codes    int8 [n_pad, k_pad]  (4 bits: uint8 [n_pad, k_pad / 2]; rows_blocked128: see blocked128)
    w_step   uint8 [k / group_size, n to whole 32] of two levels, as natural_steps (rows_blocked128: in the blocks)
    w_scale  float32 [n_pad] or [n_pad, k / group_size]      padding 1 (two levels: [n_pad], the bases)
    w_sum    int32, same shape as w_scale: sum of the codes  padding 0 (two levels: of codes times steps)
    bias     float32 [n_pad] when has_bias                    padding 0
    scalars  float32/int32 bits: x_scale, x_zero_point, out_scale, out_zero_point
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyquant import numerics
from pyquant.core.dtypes import INT4
from pyquant.errors import ArgumentError
from pyquant.ops.spec import LinearSpec

ALIGN = 256
K_MULTIPLE = 32
N_MULTIPLE = 16
BLOCKED = "rows_blocked128"
BLOCK = 128  # channels and codes of a block
STEP_CODES = 64  # codes of a channel under a step of a block
STEP_ROWS = 32  # channels whose steps a word for every 8th holds, in natural rows
BLOCK_BYTES, STEP_BYTES = BLOCK * BLOCK // 2, 2 * BLOCK  # of a block: its codes, its steps
# Axes of a matrix of codes cut up as blocked128 says, in the order in which memory runs through them; see there.
_CUT = (2, 4, 2, 8), (2, 4, 4, 4)
_ORDER = (0, 5, 1, 6, 2, 4, 8, 7, 9, 3)


@dataclass(frozen=True)
class Sections:
    """Byte offsets of the sections, and the padded sizes."""

    n_pad: int
    k_pad: int
    groups: int  # scales and sums of a channel
    w_step: int
    w_scale: int
    w_sum: int
    bias: int
    scalars: int
    total: int


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def sections(s: LinearSpec) -> Sections:
    """Offsets of all parts of a spec's buffer."""
    n_pad, k_pad = _up(s.n, N_MULTIPLE), _up(s.k, K_MULTIPLE)
    groups = s.k // s.group_size if s.group_size and not s.two_level else 1
    is_blocked = s.layout == BLOCKED
    block = BLOCK_BYTES + (STEP_BYTES if s.two_level else 0)
    blocks = _up(s.n, BLOCK) // BLOCK * (_up(s.k, BLOCK) // BLOCK)
    w_step = _up(blocks * block if is_blocked else n_pad * s.w_type.columns(k_pad), ALIGN)
    w_scale = w_step + (0 if is_blocked else _up(_up(s.n, STEP_ROWS) * s.steps, ALIGN))
    w_sum = w_scale + _up(4 * n_pad * groups, ALIGN)
    bias = w_sum + _up(4 * n_pad * groups, ALIGN)
    scalars = bias + (_up(4 * n_pad, ALIGN) if s.has_bias else 0)
    return Sections(n_pad, k_pad, groups, w_step, w_scale, w_sum, bias, scalars, scalars + ALIGN)


def packed_bytes(s: LinearSpec) -> int:
    """Size of a packed buffer in bytes, for any layout."""
    if s.layout != "cpu_blocked":
        return sections(s).total
    return _native_packed_bytes(s)


@functools.lru_cache(maxsize=4096)
def _native_packed_bytes(s: LinearSpec) -> int:
    """The blocked layout belongs to the compiled library."""
    return int(torch.ops.pyquant._packed_bytes(list(s.to_ints())))


def pack(
    s: LinearSpec,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    x_zero_point: Tensor | None,
    out_scale: Tensor | None,
    out_zero_point: Tensor | None,
) -> Tensor:
    """Checked tensors -> packed buffer (uint8 [total]) on the device of `w`."""
    at = sections(s)
    buffer = torch.zeros(at.total, dtype=torch.uint8, device=w.device)
    codes = numerics.unpack(w, s.k, s.w_type)
    step = None
    if s.two_level:
        products, w_scale, step = _two_levels(s, codes, w_scale)
    if s.layout == BLOCKED:
        blocks = blocked128(codes)
        if step is not None:
            blocks = torch.cat([blocks.view(-1, BLOCK_BYTES), blocked_steps(s, step)], 1).view(-1)
        buffer[: blocks.numel()] = blocks
    else:
        row_bytes = s.w_type.columns(at.k_pad)
        rows = buffer[: at.n_pad * row_bytes].view(at.n_pad, row_bytes)
        rows[: s.n, : w.shape[1]] = w.contiguous().view(torch.uint8)
        if step is not None:
            steps = natural_steps(step)
            buffer[at.w_step : at.w_step + steps.numel()] = steps.view(-1)
    if step is not None:
        codes = products
    per_group = s.k // max(at.groups, 1)  # -1 would be ambiguous where there are no rows
    sums = codes.reshape(s.n, at.groups, per_group).sum(-1, dtype=torch.int32) if s.k else 0
    scale = _section(buffer, at.w_scale, at.n_pad * at.groups, torch.float32)
    scale.fill_(1.0)
    scale[: s.n * at.groups] = w_scale.reshape(-1)
    _section(buffer, at.w_sum, at.n_pad * at.groups, torch.int32).view(at.n_pad, at.groups)[: s.n] = sums
    if bias is not None:
        _section(buffer, at.bias, s.n, torch.float32).copy_(bias)
    reals, integers = (_section(buffer, at.scalars, 4, dtype) for dtype in (torch.float32, torch.int32))
    reals[0] = 1.0 if x_scale is None else x_scale.reshape(())
    integers[1] = 0 if x_zero_point is None else x_zero_point.reshape(())
    reals[2] = 1.0 if out_scale is None else out_scale.reshape(())
    integers[3] = 0 if out_zero_point is None else out_zero_point.reshape(())
    return buffer


def unpack(s: LinearSpec, packed: Tensor) -> Tensor:
    """The codes as they were given to pack: int8 [n, k] or uint8 [n, ceil(k / 2)]."""
    at = sections(s)
    if s.layout == BLOCKED:
        return numerics.pack(from_blocked128(_blocks(s, packed)[:, :BLOCK_BYTES], s.n, s.k), s.w_type)
    row_bytes = s.w_type.columns(at.k_pad)
    rows = packed[: at.n_pad * row_bytes].view(at.n_pad, row_bytes)
    codes = rows[: s.n, : s.w_type.columns(s.k)]
    return codes.clone(memory_format=torch.contiguous_format).view(s.w_type.storage)


@dataclass(frozen=True)
class Parts:
    """The tensors of a packed buffer, as views where possible."""

    codes: Tensor
    w_step: Tensor | None  # uint8 [n, k / group_size] of two levels
    w_scale: Tensor
    bias: Tensor | None
    x_scale: Tensor
    x_zero_point: Tensor
    out_scale: Tensor
    out_zero_point: Tensor

    def of_channels(self, own: slice) -> Parts:
        """Those of some output channels."""
        step, bias = (None if v is None else v[own] for v in (self.w_step, self.bias))
        return replace(self, codes=self.codes[own], w_step=step, w_scale=self.w_scale[own], bias=bias)


def parts(s: LinearSpec, packed: Tensor) -> Parts:
    """Everything in a packed buffer, for the fallback and for tests."""
    at = sections(s)
    scale = _section(packed, at.w_scale, at.n_pad * at.groups, torch.float32)[: s.n * at.groups]
    reals, integers = (_section(packed, at.scalars, 4, dtype) for dtype in (torch.float32, torch.int32))
    return Parts(
        codes=unpack(s, packed),
        w_step=_steps(s, packed) if s.two_level else None,
        w_scale=scale.view(s.n, at.groups) if s.group_size and not s.two_level else scale,
        bias=_section(packed, at.bias, s.n, torch.float32) if s.has_bias else None,
        x_scale=reals[0:1],
        x_zero_point=integers[1:2],
        out_scale=reals[2:3],
        out_zero_point=integers[3:4],
    )


def input_zero_point(s: LinearSpec, packed: Tensor) -> Tensor:
    """int32 [1]: the zero point of static inputs, without unpacking anything else."""
    return _section(packed, sections(s).scalars, 4, torch.int32)[1:2]


def blocked128(codes: Tensor) -> Tensor:
    """int4 codes in the order of Hopper's registers, two a byte (csrc/core/blocked128.h is the twin).

    codes  int8 [n, k] in [-8, 7].
    ->     uint8 [n128 * k128 / 2], sizes rounded up to 128, zero codes beyond n and k. Blocks of 128 x 128 codes, along
           k first; in a block, outermost first: channel / 64, k / 64, channel / 16 % 4, channel % 8, k / 4 % 4,
           k / 16 % 4, k % 4; the two nibbles of a byte are channel / 8 % 2, low first.

    Example:
        >>> blocked128(torch.tensor([[1, -1]], dtype=torch.int8))[:2].tolist()
        [1, 15]
    """
    n, k = codes.shape
    blocks_n, blocks_k = _up(n, BLOCK) // BLOCK, _up(k, BLOCK) // BLOCK
    padded = torch.zeros(blocks_n * BLOCK, blocks_k * BLOCK, dtype=torch.uint8, device=codes.device)
    padded[:n, :k] = codes.contiguous().view(torch.uint8) & 15
    nibbles = padded.view(blocks_n, *_CUT[0], blocks_k, *_CUT[1]).permute(_ORDER)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(-1)


def from_blocked128(blocks: Tensor, n: int, k: int) -> Tensor:
    """The inverse of blocked128: int8 [n, k] from the bytes of the blocks."""
    blocks_n, blocks_k = _up(n, BLOCK) // BLOCK, _up(k, BLOCK) // BLOCK
    cut = (blocks_n, *_CUT[0], blocks_k, *_CUT[1])
    packed = blocks.reshape([cut[axis] for axis in _ORDER[:-1]])
    nibbles = torch.stack([packed & 15, packed >> 4], -1)
    back = [_ORDER.index(axis) for axis in range(len(_ORDER))]
    codes = nibbles.permute(back).reshape(blocks_n * BLOCK, blocks_k * BLOCK)[:n, :k]
    return (codes.to(torch.int8) ^ 8) - 8


def _blocks(s: LinearSpec, packed: Tensor) -> Tensor:
    """The blocks of a buffer, a row each: codes, and of two levels the steps behind them."""
    block = BLOCK_BYTES + (STEP_BYTES if s.two_level else 0)
    count = _up(s.n, BLOCK) // BLOCK * (_up(s.k, BLOCK) // BLOCK)
    return packed[: count * block].view(count, block)


def _two_levels(s: LinearSpec, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes times steps, int8 [n, k]; bases, float32 [n]; steps, uint8 [n, k / group_size]."""
    base, step = numerics.split_scales(scale, numerics.largest_step(-INT4.qmax, INT4.qmax))
    products = codes.to(torch.int16) * step.repeat_interleave(s.group_size, 1)
    if bool((base.isnan() | (products.abs().amax(1) > s.largest if s.k else False)).any()):
        allowed = f"whole steps of a number of its row, whose products with the codes lie within {s.largest}"
        raise ArgumentError("w_scale", "others", allowed)
    return products.to(torch.int8), base, step.view(torch.uint8)


def natural_steps(step: Tensor) -> Tensor:
    """Steps uint8 [n, groups] as the kernels of natural rows read them (csrc/core/steps.h is the twin).

    ->  uint8 [groups, n to whole 32], zeros beyond n; in each 32, byte 4 * (n % 8) + n / 8 % 4 is channel n's.

    Example:
        >>> natural_steps(torch.arange(9, dtype=torch.uint8).view(9, 1))[0, :6].tolist()
        [0, 8, 0, 0, 1, 0]
    """
    n, groups = step.shape
    padded = step.new_zeros(_up(n, STEP_ROWS), groups)
    padded[:n] = step
    return padded.view(padded.shape[0] // STEP_ROWS, 4, 8, groups).permute(3, 0, 2, 1).reshape(groups, padded.shape[0])


# Axes of a matrix of steps, one for 64 codes: block, channel / 64, / 16 % 4, / 8 % 2, % 8; block, k / 64 % 2.
_STEP_CUT = (2, 4, 2, 8), (2,)
_STEP_ORDER = (0, 5, 1, 2, 4, 6, 3)


def blocked_steps(s: LinearSpec, step: Tensor) -> Tensor:
    """Steps uint8 [n, k / group_size] as every block has its own (csrc/core/blocked128.h), [blocks, STEP_BYTES]."""
    blocks_n, blocks_k = _up(s.n, BLOCK) // BLOCK, _up(s.k, BLOCK) // BLOCK
    fine = step.repeat_interleave(s.group_size // STEP_CODES, 1)
    padded = step.new_zeros(blocks_n * BLOCK, 2 * blocks_k)
    padded[: s.n, : fine.shape[1]] = fine
    return padded.view(blocks_n, *_STEP_CUT[0], blocks_k, *_STEP_CUT[1]).permute(_STEP_ORDER).reshape(-1, STEP_BYTES)


def _steps(s: LinearSpec, packed: Tensor) -> Tensor:
    """The steps of a buffer, uint8 [n, k / group_size]."""
    if s.layout != BLOCKED:
        at, rows = sections(s).w_step, _up(s.n, STEP_ROWS)
        natural = packed[at : at + rows * s.steps].view(s.steps, rows // STEP_ROWS, 8, 4)
        return natural.permute(1, 3, 2, 0).reshape(rows, s.steps)[: s.n]
    cut = (_up(s.n, BLOCK) // BLOCK, *_STEP_CUT[0], _up(s.k, BLOCK) // BLOCK, *_STEP_CUT[1])
    cut_blocks = _blocks(s, packed)[:, BLOCK_BYTES:].reshape([cut[axis] for axis in _STEP_ORDER])
    fine = cut_blocks.permute([_STEP_ORDER.index(axis) for axis in range(len(cut))]).reshape(cut[0] * BLOCK, 2 * cut[5])
    return fine[: s.n, : s.k // STEP_CODES : s.group_size // STEP_CODES]


def _section(buffer: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    section = buffer[offset : offset + 4 * count]
    # A buffer that begins in the middle of a number (a slice of other bytes) can be read, from a copy.
    return (section.clone() if section.storage_offset() % 4 else section).view(dtype)
