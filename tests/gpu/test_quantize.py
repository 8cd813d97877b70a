"""Quantise, dequantise, pack and weight sums on the device against the executable specification, bit for bit."""

from __future__ import annotations

from typing import Any

import accept
import pytest
import torch
from gpu_device import SENTINEL, Memory
from problems import BASE_SEED, Draw
from torch import Tensor

from pyquant.numerics.pack import pack_int4, unpack_int4
from pyquant.numerics.quantize import dequantize, quantize, quantize_dynamic

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
WAIVER = "the value catalogue holds rows of zeros on purpose; random rows stand beside them"


def _values(draw: Draw, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different size, and the rows that break quantisers."""
    x = draw.normal(rows, cols) * torch.exp2(8 * draw.normal(rows, 1)).clamp(2.0**-12, 2.0**12)
    if rows > 9 and cols:
        x[0] = 0.0
        x[1, -1] = float("nan")
        x[2, 0] = float("inf")
        x[3, cols // 2] = -float("inf")
        x[4] = 2.0**-101
        x[5] = x[5].abs()
        x[6] = -x[6].abs()
        x[7] = -0.0
        x[8] = torch.arange(cols) % 7 - 3.0 + 0.5
    return x.to(dtype)


def _shapes(draw: Draw) -> tuple[int, int, int]:
    rows = draw.choice((1, 2, 11, 33))
    cols = draw.choice((0, 1, 7, 8, 31, 64, 100, 129, 257, 1000))
    return rows, cols, cols + draw.choice((0, 0, 3, 8, 16))


def _strided(x: Tensor, ld: int) -> Tensor:
    wide = torch.full((x.shape[0], ld), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_dynamic_per_token(native: Any, device: Memory, dtype: str, symmetric: bool) -> None:
    for index in range(12):
        draw = Draw(BASE_SEED, "dynamic", dtype, symmetric, index)
        rows, cols, ld = _shapes(draw)
        x = _values(draw, rows, cols, FLOATS[dtype])
        qmin = -127 if symmetric else -128
        ldq = cols + draw.choice((0, 1, 16))
        q = device.put(torch.full((rows, max(ldq, 1)), SENTINEL, dtype=torch.uint8))
        scale, zero = device.put(torch.zeros(rows)), device.put(torch.full((rows,), 99, dtype=torch.int32))
        native.quantize_dynamic(
            device.put(_strided(x, ld)), dtype, rows, cols, ld, symmetric, qmin, 127, q, ldq, scale, zero, 0, 0
        )
        what = f"dynamic {dtype} {rows}x{cols} ld {ld} index {index} seed {BASE_SEED}"
        want_q, want_scale, want_zero = quantize_dynamic(x, "per_token", 0, symmetric, qmin, 127)
        got = device.get(q, rows * ldq).view(torch.int8).reshape(rows, ldq)
        accept.t1(device.get(scale, rows * 4).view(torch.float32), want_scale.reshape(-1), what=what, waiver=WAIVER)
        accept.t0(device.get(zero, rows * 4).view(torch.int32), want_zero.reshape(-1), what=what, waiver=WAIVER)
        accept.t0(got[:, :cols].contiguous(), want_q, what=what, waiver=WAIVER)
        assert not got[:, cols:].any(), f"{what}: padding of K must be zero codes"
        device.free()


def test_a_row_longer_than_shared_memory(native: Any, plain_device: Memory) -> None:
    x = Draw(BASE_SEED, "long row").normal(2, 30000)
    q, scale = plain_device.put(torch.zeros(2, 30000, dtype=torch.int8)), plain_device.put(torch.zeros(2))
    native.quantize_dynamic(plain_device.put(x), "f32", 2, 30000, 30000, True, -127, 127, q, 30000, scale, 0, 0, 0)
    want_q, want_scale, _ = quantize_dynamic(x, "per_token", 0, True, -127, 127)
    accept.t1(plain_device.get(scale, 8).view(torch.float32), want_scale.reshape(-1), waiver="two scales")
    accept.t0(plain_device.get(q, 60000).view(torch.int8).reshape(2, -1), want_q)


@pytest.mark.parametrize("granularity", ["per_tensor", "per_token", "per_group"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_static_quantize_and_dequantize(native: Any, device: Memory, dtype: str, granularity: str) -> None:
    native_name = {"per_tensor": "tensor", "per_token": "rows", "per_group": "groups"}[granularity]
    for index in range(6):
        draw = Draw(BASE_SEED, "static", dtype, granularity, index)
        rows, cols, ld = _shapes(draw)
        cols = max(cols, 1)
        ld = max(ld, cols)
        group = draw.choice([g for g in range(1, cols + 1) if cols % g == 0]) if granularity == "per_group" else 0
        shape = {"per_tensor": (), "per_token": (rows,), "per_group": (rows, cols // max(group, 1))}[granularity]
        scale = torch.exp2(draw.normal(*shape)) / 30 if shape else torch.tensor(0.02)
        zero = draw.codes(-30, 30, *shape) if draw.chance(0.5) else None
        x = _values(draw, rows, cols, FLOATS[dtype])
        q = device.put(torch.zeros(rows, cols, dtype=torch.int8))
        scale_at, zero_at = device.put(scale), device.put(zero)
        native.quantize(
            device.put(_strided(x, ld)),
            dtype,
            rows,
            cols,
            ld,
            native_name,
            group,
            scale_at,
            zero_at,
            -128,
            127,
            q,
            0,
            0,
        )
        what = f"static {dtype} {granularity} {rows}x{cols} index {index} seed {BASE_SEED}"
        want = quantize(x, scale, zero, granularity, group, -128, 127)
        accept.t0(device.get(q, rows * cols).view(torch.int8).reshape(rows, cols), want, what=what, waiver=WAIVER)
        back = device.put(torch.zeros(rows, cols, dtype=FLOATS[dtype]))
        native.dequantize(q, "s8", rows, cols, cols, native_name, group, scale_at, zero_at, back, dtype, 0, 0)
        got = device.get(back, rows * cols * FLOATS[dtype].itemsize).view(FLOATS[dtype]).reshape(rows, cols)
        accept.t1(got, dequantize(want, scale, zero, granularity, group, FLOATS[dtype]), what=what, waiver=WAIVER)
        device.free()


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 7), (5, 64), (2, 0), (9, 33)])
def test_pack_unpack_and_sums(native: Any, device: Memory, rows: int, cols: int) -> None:
    codes = Draw(BASE_SEED, "pack", rows, cols).codes(-8, 7, rows, cols).to(torch.int8)
    nbytes = rows * ((cols + 1) // 2)
    packed, back = device.put(torch.zeros(nbytes, dtype=torch.uint8)), device.put(torch.zeros_like(codes))
    native.pack_int4(device.put(codes), rows, cols, packed, 0, 0)
    native.unpack_int4(packed, rows, cols, back, 0, 0)
    want = pack_int4(codes)
    accept.t0(device.get(packed, nbytes).reshape(want.shape), want, waiver="small")
    accept.t0(
        device.get(back, rows * cols).view(torch.int8).reshape(rows, cols), unpack_int4(want, cols), waiver="small"
    )
    for kind, at, ld in (("s8", device.put(codes), cols), ("s4", packed, cols + cols % 2)):
        sums = device.put(torch.zeros(rows, dtype=torch.int32))
        native.weight_sums(at, kind, rows, cols, ld, 0, sums, 0, 0)
        accept.t0(device.get(sums, rows * 4).view(torch.int32), codes.sum(-1, dtype=torch.int32), waiver="small")


def test_weight_sums_by_group(native: Any, device: Memory) -> None:
    w = Draw(BASE_SEED, "sums").codes(-128, 127, 10, 96).to(torch.int8)
    sums = device.put(torch.zeros(10, 4, dtype=torch.int32))
    native.weight_sums(device.put(w), "s8", 10, 96, 96, 24, sums, 0, 0)
    accept.t0(device.get(sums, 160).view(torch.int32).reshape(10, 4), w.reshape(10, 4, 24).sum(-1, dtype=torch.int32))
