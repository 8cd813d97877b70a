"""Quantise, dequantise, pack and weight sums on the device against the executable specification, bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import accept
import laws
import mutants
import pytest
import torch
from gpu_device import SENTINEL, Memory, shared_out
from problems import BASE_SEED, Draw
from sample import sampled
from torch import Tensor

from pyquant import numerics
from pyquant.numerics.pack import pack_int4, unpack_int4
from pyquant.numerics.quantize import dequantize, quantize, quantize_dynamic

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in FLOATS.items()}
GRANULARITIES = {"per_tensor": "tensor", "per_token": "rows", "per_group": "groups"}
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


def _shapes(draw: Draw) -> tuple[int, int]:
    return draw.choice((1, 2, 11, 33)), draw.choice((0, 1, 7, 8, 31, 64, 100, 129, 257, 1000, 2056))


def _divisor(draw: Draw, cols: int) -> int:
    return draw.choice([g for g in (1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 1000, 1028) if cols % g == 0])


def _put(draw: Draw, device: Memory, x: Tensor) -> tuple[int, int]:
    """The matrix with rows apart and, now and then, off every boundary: (pointer, row stride)."""
    shift, ld = draw.choice((0, 0, 1, 3)), x.shape[1] + draw.choice((0, 0, 3, 8, 16))
    flat = torch.full((shift + x.shape[0] * ld,), torch.nan, dtype=x.dtype)
    flat[shift:].view(x.shape[0], ld)[:, : x.shape[1]] = x
    return device.put(flat) + shift * x.element_size(), ld


@dataclass
class Target:
    """Results of one launch: where they are and how they read back."""

    device: Memory
    rows: int
    cols: int
    scales: int | None  # per row; None: one for all
    packed: bool
    fields: dict[str, Any]
    shift: int

    @staticmethod
    def draw(
        draw: Draw,
        device: Memory,
        rows: int,
        cols: int,
        scales: int | None = 1,
        symmetric: bool = True,
        can_pack: bool = True,
    ) -> Target:
        packed = can_pack and draw.chance(0.3)
        low, high = (-7, 7) if packed else (-127, 127)
        ldq = cols + draw.choice((0, 1, 2, 16))
        ldq, shift = ldq + ldq % 2 if packed else ldq, draw.choice((0, 0, 0, 1))
        nbytes = rows * (ldq // 2 if packed else ldq)
        base = device.put(torch.full((shift + nbytes,), SENTINEL, dtype=torch.uint8))
        count, sums = (1, rows) if scales is None else (rows * scales, rows * scales)
        fields = {
            "q": base + shift,
            "ldq": ldq,
            "packed": packed,
            "symmetric": symmetric,
            "qmin": low if symmetric else low - 1,
            "qmax": high,
            "scale": device.put(torch.full((count,), 7.0)),
            "zero_point": device.put(torch.full((count,), 99)),
            "row_sum": device.put(torch.full((sums,), 55)) if draw.chance(0.5) else 0,
        }
        return Target(device, rows, cols, scales, packed, fields, shift)

    def limits(self) -> tuple[bool, int, int]:
        return self.fields["symmetric"], self.fields["qmin"], self.fields["qmax"]

    def codes(self) -> Tensor:
        """[rows, ldq] int8, unpacked."""
        ldq = self.fields["ldq"]
        row = ldq // 2 if self.packed else ldq
        data = self.device.get(self.fields["q"] - self.shift, self.shift + self.rows * row)[self.shift :]
        data = data.reshape(self.rows, row)
        return unpack_int4(data, ldq) if self.packed else data.view(torch.int8)

    def read(self, name: str, count: int) -> Tensor:
        dtype = torch.float32 if name == "scale" else torch.int32
        return self.device.get(self.fields[name], 4 * count).view(dtype)

    def compare(self, codes: Tensor, scale: Tensor | None, zero_point: Tensor | None, what: str) -> None:
        got = self.codes()
        if scale is not None and zero_point is not None:
            accept.t1(self.read("scale", scale.numel()), scale.reshape(-1), what=f"scale of {what}", waiver=WAIVER)
            accept.t0(self.read("zero_point", zero_point.numel()), zero_point.reshape(-1), what=what, waiver=WAIVER)
        accept.t0(got[:, : self.cols].contiguous(), codes.reshape(self.rows, self.cols), what=what, waiver=WAIVER)
        assert not got[:, self.cols :].any(), f"{what}: padding of K must be zero codes"
        if self.fields["row_sum"]:
            parts = 1 if self.scales is None else self.scales
            grouped = codes.reshape(self.rows, parts, self.cols // max(parts, 1))
            want = grouped.sum(-1, dtype=torch.int32).reshape(-1)
            accept.t0(self.read("row_sum", want.numel()), want, what=f"row sums of {what}", waiver=WAIVER)


def _job(draw: Draw, granularity: str, cols: int) -> tuple[int, int | None]:
    """group_size and scales a row."""
    if granularity != "per_group":
        return 0, 1 if granularity == "per_token" else None
    group = _divisor(draw, cols)
    return group, cols // group


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_dynamic(native: Any, device: Memory, dtype: str, symmetric: bool, granularity: str) -> None:
    for index in shared_out(device, range(8), dtype, symmetric, granularity):
        draw = Draw(BASE_SEED, "dynamic", dtype, symmetric, granularity, index)
        rows, cols = _shapes(draw)
        x = _values(draw, rows, cols, FLOATS[dtype])
        if granularity == "per_tensor" and draw.chance(0.7):
            x = x.nan_to_num(0.5, 0.25, -0.25)  # one poisoned value makes everything NaN
        group, scales = _job(draw, granularity, cols)
        target = Target.draw(draw, device, rows, cols, scales, symmetric, group % 2 == 0)
        data, ld = _put(draw, device, x)
        native.quantize_dynamic(
            {"data": data, "type": dtype, "rows": rows, "cols": cols, "ld": ld},
            GRANULARITIES[granularity],
            group,
            target.fields,
            device.put(torch.full((native.quantize_workspace_bytes,), SENTINEL, dtype=torch.uint8)),
        )
        what = f"dynamic {granularity}/{group} {dtype} {rows}x{cols} ld {ld} {target.fields} index {index}"
        target.compare(*quantize_dynamic(x, granularity, group, *target.limits()), what)
        device.free()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_static_quantize_and_dequantize(native: Any, device: Memory, dtype: str, granularity: str) -> None:
    for index in shared_out(device, range(6), dtype, granularity):
        draw = Draw(BASE_SEED, "static", dtype, granularity, index)
        rows, cols = _shapes(draw)
        group, scales = _job(draw, granularity, cols)
        shape = {"per_tensor": (1,), "per_token": (rows,), "per_group": (rows, scales)}[granularity]
        target = Target.draw(draw, device, rows, cols, scales, False, group % 2 == 0)
        scale = torch.exp2(draw.normal(*shape)) / (3 if target.packed else 30)
        zero = draw.codes(*((-8, 7) if target.packed else (-30, 30)), *shape) if draw.chance(0.5) else None
        x = _values(draw, rows, cols, FLOATS[dtype])
        data, ld = _put(draw, device, x)
        target.fields |= {"scale": device.put(scale), "zero_point": device.put(zero)}
        native.quantize(
            {"data": data, "type": dtype, "rows": rows, "cols": cols, "ld": ld},
            GRANULARITIES[granularity],
            group,
            target.fields,
        )
        what = f"static {granularity}/{group} {dtype} {rows}x{cols} ld {ld} {target.fields} index {index}"
        want = quantize(x, scale, zero, granularity, group, *target.limits()[1:])
        target.compare(want, None, None, what)
        q, back = device.put(want), device.put(torch.zeros(rows, cols, dtype=FLOATS[dtype]))
        native.dequantize(
            q,
            "s8",
            rows,
            cols,
            cols,
            GRANULARITIES[granularity],
            group,
            target.fields["scale"],
            target.fields["zero_point"],
            back,
            dtype,
            0,
            0,
        )
        got = device.get(back, rows * cols * FLOATS[dtype].itemsize).view(FLOATS[dtype]).reshape(rows, cols)
        accept.t1(got, dequantize(want, scale, zero, granularity, group, FLOATS[dtype]), what=what, waiver=WAIVER)
        device.free()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("code", ["s8", "u8", "s4"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dequantize(native: Any, device: Memory, dtype: str, code: str, granularity: str) -> None:
    """Any rows apart, off every boundary, with groups that end within a unit, and zero points of any size."""
    low, high = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7)}[code]
    for index in shared_out(device, range(6), dtype, code, granularity):
        draw = Draw(BASE_SEED, "dequantize", dtype, code, granularity, index)
        rows, cols = _shapes(draw)
        group, scales = _job(draw, granularity, cols)
        shape = {"per_tensor": (1,), "per_token": (rows,), "per_group": (rows, scales)}[granularity]
        per_byte = 2 if code == "s4" else 1
        ld = (cols + draw.choice((0, 0, 1, 8, 16)) + 1) // per_byte * per_byte
        codes = torch.randint(low, high + 1, (rows, ld), generator=draw.generator, dtype=torch.int32)
        stored = pack_int4(codes.to(torch.int8)) if code == "s4" else codes.to(torch.uint8).view(torch.uint8)
        shift = draw.choice((0, 0, 1))
        data = device.put(torch.cat([torch.zeros(shift, dtype=torch.uint8), stored.flatten()])) + shift
        scale = torch.exp2(draw.normal(*shape))
        zero = draw.codes(low, high, *shape) if draw.chance(0.6) else None
        if zero is not None and zero.numel() and draw.chance(0.3):
            zero.flatten()[0] = draw.choice((1 << 21, -(1 << 22), 1 << 30))
        back = device.put(torch.zeros(rows, cols, dtype=FLOATS[dtype]))
        native.dequantize(
            data,
            code,
            rows,
            cols,
            ld,
            GRANULARITIES[granularity],
            group,
            device.put(scale),
            device.put(zero),
            back,
            dtype,
            0,
            0,
        )
        got = device.get(back, rows * cols * FLOATS[dtype].itemsize).view(FLOATS[dtype]).reshape(rows, cols)
        of = codes[:, :cols].contiguous().to(torch.uint8 if code == "u8" else torch.int8)
        want = dequantize(of, scale, zero, granularity, group, FLOATS[dtype])
        what = f"{code} {granularity}/{group} {dtype} {rows}x{cols} ld {ld} index {index}"
        accept.t1(got, want, what=what, waiver=WAIVER)
        device.free()


def _produce(
    native: Any,
    device: Memory,
    name: str,
    call: dict[str, Any],
    draw: Draw,
    what: str,
    compare: Callable[..., None] = Target.compare,
) -> None:
    """One fused launch against pyquant.numerics."""
    x = call["x"]
    rows, k = x.shape[0], x.shape[1] // (2 if name == "silu_mul" else 1)
    target = Target.draw(draw, device, rows, k, 1, call["symmetric"])
    _, call["qmin"], call["qmax"] = target.limits()
    data, ld = _put(draw, device, x)
    matrix = {"data": data, "type": NAMES[x.dtype], "rows": rows, "cols": x.shape[1], "ld": ld}
    total = 0
    if name == "silu_mul":
        gate = {"up": data + k * x.element_size(), "ldu": ld}
        native.activation_mul_quantize(matrix | {"cols": k}, gate, target.fields)
    elif name == "activation_mul":
        up, ldu = _put(draw, device, call["up"])
        gate = {name: call[name] for name in ("activation", "clamp_min", "clamp_max")}
        native.activation_mul_quantize(matrix, gate | {"up": up, "ldu": ldu}, target.fields)
    elif name == "hadamard":
        native.hadamard_quantize(matrix, call["block"], target.fields)
    else:
        norm: dict[str, Any] = {"subtract_mean": "layer" in name, "eps": call["eps"]}
        for channel in ("weight", "bias"):
            if call.get(channel) is not None:
                norm |= {channel: device.put(call[channel]), f"{channel}_type": NAMES[call[channel].dtype]}
        if "residual" in call:
            norm["residual"], norm["ldr"] = _put(draw, device, call["residual"])
            norm["sum"] = total = device.put(torch.full((rows, k), 7.0, dtype=x.dtype))
        native.norm_quantize(matrix, norm, target.fields)
    want = getattr(numerics, f"{name}_quantize")(**call)
    compare(target, *want[:3], what)
    if total:
        got = device.get(total, rows * k * x.element_size()).view(x.dtype).reshape(rows, k)
        accept.t1(got, want[3], what=f"sum of {what}", waiver=WAIVER)
    device.free()


@pytest.mark.parametrize("name", laws.PRODUCERS)
def test_norm_or_gate_and_quantize(native: Any, device: Memory, name: str) -> None:
    for index in shared_out(device, range(9), name):
        draw = Draw(BASE_SEED, "producer", name, index)
        k = 0 if index == 8 else None
        call = laws.producer_call(name, BASE_SEED + 100 + index, k=k)
        _produce(native, device, name, call, draw, f"{name} {list(call['x'].shape)} {call['x'].dtype} index {index}")


def test_channels_of_a_norm_of_every_type(native: Any, device: Memory) -> None:
    """Also of a 16-bit type that the input has not, which takes the way of misaligned ones."""
    mixes = [(x, weight, bias) for x in FLOATS for weight in (*FLOATS, None) for bias in (*FLOATS, None)]
    for index, (x, weight, bias) in enumerate(mixes):
        draw = Draw(BASE_SEED, "channels", index)
        call = laws.producer_call("layer_norm", BASE_SEED + index, rows=2, k=draw.choice((24, 2048, 2051, 20_000)))
        call["x"] = call["x"].to(FLOATS[x])
        for channel, dtype in (("weight", weight), ("bias", bias)):
            call[channel] = None if dtype is None else draw.normal(call["x"].shape[1]).to(FLOATS[dtype])
        _produce(native, device, "layer_norm", call, draw, f"{list(call['x'].shape)} {x} {weight} {bias}")


# Each is a plausible kernel that adds, rounds or divides otherwise; on the data above it must be seen.
SLIPS = {
    "sums in order": ("lanes[..., 0::2] + lanes[..., 1::2]", "lanes.cumsum(-1)[..., -1:]", "rms_norm"),
    "tree of halves": ("lanes[..., 0::2] + lanes[..., 1::2]", "torch.add(*lanes.chunk(2, -1))", "rms_norm"),
    "other lanes": ("SUM_LANES: Final = 2048", "SUM_LANES: Final = 1024", "layer_norm"),
    "mean by a reciprocal": (
        "(sum_in_lanes(x) / as_float32(x.shape[-1], x))",
        "(sum_in_lanes(x) * as_float32(1 / x.shape[-1], x))",
        "layer_norm",
    ),
    "rsqrt": ("torch.ones_like(shifted) / sqrt(shifted)", "shifted.double().rsqrt().float()", "rms_norm"),
    "eps forgotten": ("mean_square + as_float32(eps, mean_square)", "mean_square", "rms_norm"),
    "weight before the factor": (
        "t = t * factor\n    if weight is not None:\n        t = t * weight.to(torch.float32)",
        "t = t * (factor * weight)",
        "rms_norm",
    ),
    "norm of the exact sum": (
        "return (*rms_norm_quantize(total,",
        "return (*rms_norm_quantize(x.float() + residual.float(),",
        "add_rms_norm",
    ),
    "gate and up exchanged": ("gate, up = x.to", "up, gate = x.to", "silu_mul"),
    "up activated": (
        "return activate(x.to(torch.float32).contiguous(), activation, clamp_min, clamp_max) * up.to(torch.float32)",
        "return activate(up.to(torch.float32).contiguous(), activation, clamp_min, clamp_max) * x.to(torch.float32)",
        "activation_mul",
    ),
    "gate rounded": (
        "activation, clamp_min, clamp_max) * up.to",
        "activation, clamp_min, clamp_max).to(torch.bfloat16) * up.to",
        "activation_mul",
    ),
    "no mean": ("t = t - _mean(t)\n", "t = t - 0 * _mean(t)\n", "layer_norm"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_the_arithmetic_is_seen(native: Any, plain_device: Memory, slip: str) -> None:
    old, new, name = SLIPS[slip]
    seen = 0
    with mutants.edit("numerics.norm", old, new)():
        for index in range(6):
            draw = Draw(BASE_SEED, "slip", index)
            x = (draw.normal(24, 2100) * 3 + 1).to(torch.bfloat16 if name.startswith("add") else torch.float32)
            call = {"x": x, "symmetric": True, "qmin": -127, "qmax": 127}
            if name == "activation_mul":
                call |= {"up": draw.normal(24, 2100), "activation": "gelu", "clamp_min": 0.0, "clamp_max": 0.0}
            elif name != "silu_mul":
                call |= {"weight": draw.normal(2100), "eps": 1e-3}
            if name.startswith("add"):
                call["residual"] = draw.normal(24, 2100).to(x.dtype)
            try:
                _produce(native, plain_device, name, call, draw, slip)
            except accept.Rejected:
                seen += 1
            plain_device.free()
    assert seen >= 3, f"'{slip}' was seen in {seen} of 6 cases"


# What a block holds at once (csrc/cuda/quantize/rows.cuh): all of a row or a part of it; one unit a thread or many, in
# blocks of any number of warps; lanes of a norm in one set or several; ends of rows within a unit or not.
SHAPES = {
    "parts of a row": (2, 70001),
    "parts of a row, aligned": (2, 65792),
    "many units a thread": (2100, 1096),
    "many sets of lanes": (1030, 4072),
    "two sets of lanes": (1024, 5003),
    "ends within a unit": (1030, 2043),
}


HELD = [*product(["plain", "affine", *laws.PRODUCERS], SHAPES, FLOATS)]


@pytest.mark.parametrize("case", sampled(HELD, len(HELD) // 3, "held"))
def test_every_way_to_hold_a_row(native: Any, plain_device: Memory, case: tuple[str, str, str]) -> None:
    name, shape, dtype = case
    draw, (rows, k) = Draw(BASE_SEED, "held", name, shape), SHAPES[shape]
    if name in ("plain", "affine"):
        x = _values(draw, rows, k, FLOATS[dtype])
        target = Target.draw(draw, plain_device, rows, k, symmetric=name == "plain")
        matrix = {"data": plain_device.put(x), "type": dtype, "rows": rows, "cols": k}
        native.quantize_dynamic(matrix, "rows", 0, target.fields)
        target.compare(*quantize_dynamic(x, "per_token", 0, *target.limits()), shape)
    else:
        if name == "hadamard":  # rows that shared memory holds, in blocks of every base
            k = {70001: 40961, 65792: 57344, 1096: 1120, 5003: 5040, 4072: 4224, 2043: 2046}[k]
        call = laws.producer_call(name, BASE_SEED, rows, k)
        floats = {key: value for key, value in call.items() if isinstance(value, Tensor)}
        call |= {key: value.to(FLOATS[dtype]) for key, value in floats.items()}
        _produce(native, plain_device, name, call, draw, f"{shape} {name}")
    plain_device.free()


BLOCKS = [*(1 << k for k in range(16)), 12, 24, 48, 96, 768, 1536, 20, 40, 80, 160, 5120, 28, 56, 112, 224, 14336]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_every_order(native: Any, plain_device: Memory, block: int, dtype: str) -> None:
    """One, two and five blocks a row, ends within a unit of sixteen, rows off every boundary; the transform itself has
    its sums rounded once, and the sign of each zero."""
    for blocks in (1, 2, 5) if block < 12000 else (1,):
        draw = Draw(BASE_SEED, "blocks", block, dtype, blocks)
        rows, cols = draw.choice((1, 3, 11)), block * blocks
        x = _values(draw, rows, cols, FLOATS[dtype])
        data, ld = _put(draw, plain_device, x)
        matrix = {"data": data, "type": dtype, "rows": rows, "cols": cols, "ld": ld}
        out = plain_device.put(torch.full((rows, cols), 7.0, dtype=x.dtype))
        native.hadamard_transform(matrix, block, out)
        got = plain_device.get(out, rows * cols * x.element_size()).view(x.dtype).reshape(rows, cols)
        want, what = numerics.hadamard_transform(x, block), f"{dtype} {rows}x{cols} ld {ld} in blocks of {block}"
        accept.t1(got, want, what=what, waiver=WAIVER)
        symmetric = draw.chance(0.5)
        target = Target.draw(draw, plain_device, rows, cols, 1, symmetric)
        scale = draw.choice((None, 0.75, numerics.hadamard.power_scale(block), 2.0**40, 2.0**-100))
        native.hadamard_quantize(matrix, block, target.fields, scale)
        target.compare(*numerics.hadamard_quantize(x, block, *target.limits(), scale), f"{what} scale {scale}")
        plain_device.free()


# columns and block: rows end within a group of threads, within a unit, and with whole ones
MANY = [(2048, 1), (1100, 4), (1840, 16), (2016, 32), (1984, 64), (1920, 128), (1280, 256), (1792, 256), (1536, 512)]
MANY += [(2048, 1024), (2048, 2048), (4096, 4096), (24576, 8192), (16384, 16384), (1500, 12), (1344, 28 << 4)]
MANY += [(1920, 20 << 5), (1792, 28 << 6), (1536, 12 << 7), (6144, 12 << 8), (5120, 20 << 8), (14336, 28 << 9)]
MANY += [(12288, 12 << 10), (24576, 12 << 11)]


@pytest.mark.parametrize("case", sampled(MANY, len(MANY) // 2, "many rows"))
def test_many_rows_whose_threads_have_all_their_units(native: Any, plain_device: Memory, case: tuple[int, int]) -> None:
    """Few rows have more threads, with fewer units each, which do the steps of 256 and 128 elsewhere."""
    cols, block = case
    draw = Draw(BASE_SEED, "many rows", cols, block)
    dtype, rows = draw.choice(tuple(FLOATS)), (1 << 22) // cols + 3
    x = _values(draw, rows, cols, FLOATS[dtype])
    data, ld = _put(draw, plain_device, x)
    matrix = {"data": data, "type": dtype, "rows": rows, "cols": cols, "ld": ld}
    what = f"{dtype} {rows}x{cols} ld {ld} in blocks of {block}"
    out = plain_device.put(torch.full((rows, cols), 7.0, dtype=x.dtype))
    native.hadamard_transform(matrix, block, out)
    got = plain_device.get(out, rows * cols * x.element_size()).view(x.dtype).reshape(rows, cols)
    accept.t1(got, numerics.hadamard_transform(x, block), what=what, waiver=WAIVER)
    for scale in (None, numerics.hadamard.power_scale(block)):
        target = Target.draw(draw, plain_device, rows, cols, 1, draw.chance(0.5))
        native.hadamard_quantize(matrix, block, target.fields, scale)
        target.compare(*numerics.hadamard_quantize(x, block, *target.limits(), scale), f"{what} scale {scale}")
    plain_device.free()


def test_a_row_that_shared_memory_cannot_hold_is_refused(native: Any, plain_device: Memory) -> None:
    x = {"data": plain_device.put(torch.zeros(1 << 17)), "type": "f32", "rows": 1, "cols": 1 << 17, "ld": 1 << 17}
    with pytest.raises(RuntimeError, match="rows of 131072 columns, 524288 bytes of shared memory; allowed"):
        native.hadamard_transform(x, 1 << 17, plain_device.put(torch.zeros(1 << 17)))
    plain_device.free()


@pytest.mark.parametrize("group", [4, 8, 16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("dtype", FLOATS)
def test_groups_of_whole_units(native: Any, plain_device: Memory, dtype: str, group: int) -> None:
    """Groups that a few lanes hold (csrc/cuda/quantize/short_groups.cu) and the sizes next to them, in rows that lie
    apart or are one run of groups, more of them than a block takes at once; all kinds of steps and codes."""
    for index, (rows, cols) in enumerate(((1, 512), (3, 3072), (11, 512), (2, 20480), (23, 1536))):
        draw = Draw(BASE_SEED, "whole units", dtype, group, index)
        x = _values(draw, rows, cols, FLOATS[dtype])
        ld = cols + draw.choice((0, 8, 64))
        data = torch.zeros(rows, ld, dtype=x.dtype)
        data[:, :cols] = x
        for symmetric, qmin, qmax in ((True, -127, 127), (False, -128, 127), (True, -7, 7), (False, -8, 7)):
            target = Target.draw(draw, plain_device, rows, cols, cols // group, symmetric)
            target.packed = qmax == 7 and draw.chance(0.7)
            q = plain_device.put(torch.full((rows * cols,), SENTINEL, dtype=torch.uint8))
            target.shift = 0
            target.fields |= {"q": q, "ldq": cols, "packed": target.packed, "row_sum": 0, "qmin": qmin, "qmax": qmax}
            matrix = {"data": plain_device.put(data), "type": dtype, "rows": rows, "cols": cols, "ld": ld}
            native.quantize_dynamic(matrix, "groups", group, target.fields, 0)
            codes, scale, zero_point = quantize_dynamic(x, "per_group", group, symmetric, qmin, qmax)
            what = f"{dtype} {rows}x{cols} ld {ld} in groups of {group}, {qmin} to {qmax}, index {index}"
            target.compare(codes, scale, zero_point, what)
            given = scale.nan_to_num(1.0)
            target.fields |= {"scale": plain_device.put(given)}
            native.quantize(matrix, "groups", group, target.fields)
            target.compare(quantize(x, given, zero_point, "per_group", group, qmin, qmax), None, None, what)
        plain_device.free()


def test_what_a_quantiser_cannot_write_is_refused(native: Any, plain_device: Memory) -> None:
    x = {"data": plain_device.put(torch.zeros(2, 6)), "rows": 2, "cols": 6}
    q, scale = plain_device.put(torch.zeros(2, 8)), plain_device.put(torch.zeros(12))
    common = {"q": q, "scale": scale}
    for granularity, group, wrong, text in (
        ("rows", 0, {"ldq": 5}, "ldq 5; allowed: at least 6"),
        ("rows", 0, {"ldq": 7, "packed": True, "qmin": -7, "qmax": 7}, "ldq 7; allowed: at least 6 and even"),
        ("rows", 0, {"ldq": 8, "packed": True}, "packed codes from -127 to 127"),
        ("groups", 3, {"ldq": 8, "packed": True, "qmin": -7, "qmax": 7}, "group_size 3"),
    ):
        with pytest.raises(RuntimeError, match=text):
            native.quantize_dynamic(x, granularity, group, common | wrong)
    with pytest.raises(ValueError, match="unknown keys"):
        native.quantize_dynamic(x, "rows", 0, common | {"ldq": 6, "pack": True})


@pytest.mark.parametrize("dtype", FLOATS)
def test_memory_is_touched_once_and_in_whole_sectors(
    native: Any, plain_device: Memory, dtype: str, tmp_path: Path
) -> None:
    """Bytes that the simulator counted, against those of the matrices."""
    if not plain_device.is_simulator:
        pytest.skip("the simulator counts; a GPU's profiler is another tool")
    rows, k, size = 6, 4096, FLOATS[dtype].itemsize
    x = Draw(BASE_SEED, "traffic").normal(rows, 2 * k).to(FLOATS[dtype])
    other, weight = plain_device.put(x), plain_device.put(torch.ones(k, dtype=FLOATS[dtype]))
    total = plain_device.put(torch.zeros(rows, k, dtype=FLOATS[dtype]))
    matrix = {"data": plain_device.put(x), "type": dtype, "rows": rows, "cols": k, "ld": 2 * k}
    out = {"q": plain_device.put(torch.zeros(rows, k, dtype=torch.int8)), "ldq": k}
    out |= {"scale": plain_device.put(torch.ones(rows * k)), "zero_point": plain_device.put(torch.zeros(rows * k))}
    norm = {"weight": weight, "weight_type": dtype, "eps": 1e-6, "subtract_mean": True}
    added = {"residual": other, "ldr": 2 * k, "sum": total}
    gate = {"up": other, "ldu": 2 * k, "activation": "gelu"}
    work = plain_device.put(torch.zeros(native.quantize_workspace_bytes, dtype=torch.uint8))
    one = rows * k * size
    four = {"packed": True, "qmin": -7, "qmax": 7}
    codes, lone = rows * k, 32 * 2 * rows  # a scale or zero point alone takes a sector
    launches: dict[str, tuple[Callable[[], None], int, int, int]] = {  # launch, bytes in, bytes out, sectors besides
        "per_token": (lambda: native.quantize_dynamic(matrix, "rows", 0, out), one, codes, lone),
        "per_group": (lambda: native.quantize_dynamic(matrix, "groups", 128, out), one, codes, 32 * lone),
        "per_tensor": (lambda: native.quantize_dynamic(matrix, "tensor", 0, out, work), 2 * one, codes, 1 << 16),
        "given": (lambda: native.quantize(matrix, "rows", 0, out), one, codes, 32 << 10),
        "packed": (lambda: native.quantize_dynamic(matrix, "rows", 0, out | four), one, codes // 2, lone),
        "norm": (lambda: native.norm_quantize(matrix, norm, out), 2 * one, codes, lone),
        "add_norm": (lambda: native.norm_quantize(matrix, norm | added, out), 3 * one, codes + one, lone),
        "gate": (lambda: native.activation_mul_quantize(matrix, gate, out), 2 * one, codes, lone),
        "hadamard": (lambda: native.hadamard_quantize(matrix, k, out), one, codes, lone),
        "turned": (lambda: native.hadamard_transform(matrix, k, total), one, one, 0),
    }
    for name, (launch, bytes_in, bytes_out, besides) in launches.items():
        path = tmp_path / f"{name}.json"
        plain_device.count(path)
        launch()
        plain_device.count(None)
        # The simulator's file holds every launch of the process: ours is the last, or the last two.
        counters = json.loads(path.read_text())[-1 if name != "per_tensor" else -2 :]
        for kind, least in (("global_load", bytes_in), ("global_store", bytes_out)):
            asked = sum(c[kind]["bytes"] for c in counters)
            touched = 32 * sum(c[kind]["sectors"] for c in counters)
            assert asked >= least, f"{name} {dtype} {kind}: {asked} bytes of {least}"
            assert touched <= least / 0.9 + besides, f"{name} {dtype} {kind}: sectors of {touched} bytes for {least}"


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


# Instructions of a thread for each element that it owns, moves of registers apart (the assembler drops most of them).
# The kernels before these had some 33 for a plain row and three to four times as many for a norm.
BUDGETS = {
    "per_token": 9,
    "packed": 10,
    "affine": 13,
    "rms_norm": 15.5,
    "layer_norm": 20,
    "rms_norm_residual": 20,
    "layer_norm_residual": 24.5,
    "groups": 9.5,
    "groups_of_32": 9,
    "affine_groups": 14,
    "affine_groups_of_32": 14,
    "groups_given": 11,
    "given": 13,
    "dequantize": 14.5,
    # two values an element, a product, and the curve
    "gate_relu": 19.5,
    "gate_silu": 43.5,
    "gate_gelu": 44.5,
    "gate_gelu_tanh": 46.5,
}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_instructions_of_an_element(native: Any, plain_device: Memory, dtype: str, tmp_path: Path) -> None:
    if not plain_device.is_simulator:
        pytest.skip("the simulator counts; a GPU's profiler is another tool")
    rows, k = 2048, 4096
    x = plain_device.put(Draw(BASE_SEED, "budget").normal(rows, k).to(FLOATS[dtype]))
    weight = plain_device.put(torch.ones(k, dtype=FLOATS[dtype]))
    matrix = {"data": x, "type": dtype, "rows": rows, "cols": k, "ld": k}
    out = {"q": plain_device.put(torch.zeros(rows, k, dtype=torch.int8)), "ldq": k, "row_sum": 0}
    out |= {"scale": plain_device.put(torch.ones(rows)), "zero_point": plain_device.put(torch.zeros(rows))}
    rms = {"weight": weight, "weight_type": dtype, "eps": 1e-6, "subtract_mean": False}
    layer = rms | {"bias": weight, "bias_type": dtype, "subtract_mean": True}
    affine = {"symmetric": False, "qmin": -128, "qmax": 127}
    q, scales = out["q"], plain_device.put(torch.ones(rows, k // 128))
    many = out | {"scale": scales, "zero_point": plain_device.put(torch.zeros(rows, k // 128))}
    few = out | {"scale": plain_device.put(torch.ones(rows, k // 32)), "zero_point": 0}
    affine_few = few | affine | {"zero_point": plain_device.put(torch.zeros(rows, k // 32, dtype=torch.int32))}
    given = out | {"scale": scales, "zero_point": 0}
    added = {"residual": x, "ldr": k, "sum": x}
    gate = {"up": x, "ldu": k}
    launches: dict[str, Callable[[], None]] = {
        "per_token": lambda: native.quantize_dynamic(matrix, "rows", 0, out),
        "rms_norm_residual": lambda: native.norm_quantize(matrix, rms | added, out),
        "layer_norm_residual": lambda: native.norm_quantize(matrix, layer | added, out),
        "affine_groups_of_32": lambda: native.quantize_dynamic(matrix, "groups", 32, affine_few),
        "affine_groups": lambda: native.quantize_dynamic(matrix, "groups", 128, many | affine),
        "packed": lambda: native.quantize_dynamic(matrix, "rows", 0, out | {"packed": True, "qmin": -7, "qmax": 7}),
        "affine": lambda: native.quantize_dynamic(matrix, "rows", 0, out | affine),
        "rms_norm": lambda: native.norm_quantize(matrix, rms, out),
        "layer_norm": lambda: native.norm_quantize(matrix, layer, out),
        "groups": lambda: native.quantize_dynamic(matrix, "groups", 128, many),
        "groups_of_32": lambda: native.quantize_dynamic(matrix, "groups", 32, few),
        "groups_given": lambda: native.quantize(matrix, "groups", 128, given),
        "given": lambda: native.quantize(matrix, "rows", 0, given),
        **{
            f"gate_{curve}": partial(native.activation_mul_quantize, matrix, gate | {"activation": curve}, out)
            for curve in ("relu", "silu", "gelu", "gelu_tanh")
        },
        "dequantize": lambda: native.dequantize(q, "s4", rows, k, k, "groups", 128, scales, 0, x, dtype, 0, 0),
    }
    for name, launch in launches.items():
        executed = _executed(plain_device, tmp_path / f"{name}.json", launch, rows * k)
        without_moves = sum(executed.values()) - executed["mov"]
        assert without_moves <= BUDGETS[name], f"{name} {dtype}: {without_moves:.2f} an element: {executed}"
        slow = [kind for kind in ("cvt.frnd", "cvt.f2i") if executed.get(kind, 0) > 0.1]  # 16 lanes a clock
        assert not slow, f"{name} {dtype}: {slow}"


def _executed(device: Memory, path: Path, launch: Callable[[], None], elements: int) -> dict[str, float]:
    """Instructions by class that the last kernel of a launch executes for each element."""
    device.count(path)
    launch()
    device.count(None)
    classes = json.loads(path.read_text())[-1]["classes"]
    return {kind: 32 * count / elements for kind, count in classes.items()}


# block -> what its transform adds to an element of a plain row; None: a step for each power of two, and two
TRANSFORMS = {
    **dict.fromkeys((32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
    6144: 17.4,
    10240: 20.4,
    14336: 21.8,  # 12, 20 and 28 runs: 5, 7 and 9 sums, which are not log2 of so many
}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_transform_adds_its_steps_and_two_instructions(
    native: Any, plain_device: Memory, dtype: str, tmp_path: Path
) -> None:
    """With the scale of the layers that rotate_ makes; as many bytes of memory as without."""
    if not plain_device.is_simulator:
        pytest.skip("the simulator counts; a GPU's profiler is another tool")
    plain: dict[int, Counts] = {}
    for block, most in TRANSFORMS.items():
        added, turned = _added(native, plain_device, dtype, block, tmp_path / f"{block}.json", plain)
        assert added <= (most or math.log2(block) + 2), f"{block} {dtype}: {added:.2f} an element: {turned}"


def _without_moves(executed: dict[str, float]) -> float:
    """What machine code executes too: copies are gone there, and arguments are in registers and constants."""
    return sum(executed.values()) - executed["mov"] - executed["param"]


Counts = tuple[dict[str, float], dict[str, Any]]  # what is executed an element, by class; what the simulator tells


def _added(
    native: Any, device: Memory, dtype: str, block: int, path: Path, of_plain: dict[int, Counts]
) -> tuple[float, dict[str, float]]:
    """What a block's transform adds to a plain row, and all that is executed, by class.

    of_plain   {columns: what plain rows execute}, to which rows that were not counted before are added.
    """
    k = max(block, 4096)
    rows = 2048 if k < 8192 else 1024  # a thread has all that it can hold: few rows have more threads
    x = device.put(Draw(BASE_SEED, "transform").normal(rows, k).to(FLOATS[dtype]))
    matrix = {"data": x, "type": dtype, "rows": rows, "cols": k, "ld": k}
    out = {"q": device.put(torch.zeros(rows, k, dtype=torch.int8)), "ldq": k, "row_sum": 0}
    out |= {"scale": device.put(torch.ones(rows)), "zero_point": device.put(torch.zeros(rows))}
    if k not in of_plain:
        counts = _executed(device, path, lambda: native.quantize_dynamic(matrix, "rows", 0, out), rows * k)
        of_plain[k] = counts, json.loads(path.read_text())[-1]
    plain, plain_bytes = of_plain[k]
    scale = numerics.hadamard.power_scale(block)
    turned = _executed(device, path, lambda: native.hadamard_quantize(matrix, block, out, scale), rows * k)
    turned_bytes = json.loads(path.read_text())[-1]
    for kind in ("global_load", "global_store"):
        assert turned_bytes[kind]["sectors"] <= plain_bytes[kind]["sectors"], f"{block} {dtype}: {kind}"
    added = _without_moves(turned) - _without_moves(plain)
    print(f"transform of {block}, {dtype}: {added:.2f} instructions an element, log2 + 2 {math.log2(block) + 2:.2f}")
    device.free()
    return added, turned
