"""The CPU engine (csrc/cpu) on every instruction set of this machine: bits equal to an int64 and fp32 reference."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from csrc.cpu_engine import (
    BF16,
    F16,
    F32,
    ISAS,
    LIBRARY,
    ROOT,
    S4,
    S8,
    S32,
    STORAGE,
    U8,
    Array,
    Finish,
    Gemm,
    at,
    build,
    canonical,
    code_from_real,
    compiler,
    link,
    load,
    objects,
    packed_nibbles,
    row_params,
    stored,
    widened,
)
from made_once import made_once
from problems import BASE_SEED
from sanitizers import build as sanitizers

from csrc import conv_cases

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="pyquant was installed without its native module"),
]

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 100, 127, 128, 129, 200, 257)
GROUPS = (1, 3, 4, 5, 8, 12, 16, 32, 64, 100, 128)
FLOATS = (F32, F16, BF16)
GUARD = 0x5A


@pytest.fixture(scope="session")
def folder(folder_of_the_run: Path) -> Path:
    return made_once(folder_of_the_run, "cpu_engine", build)


@pytest.fixture(scope="session")
def engine(folder: Path) -> ctypes.CDLL:
    return load(folder / "libcpu_engine.so", os.RTLD_DEEPBIND)


def test_what_is_set_here_is_not_set_in_torchs_operators(engine: ctypes.CDLL) -> None:
    """The library is loaded a second time, under another name."""
    in_use = ctypes.CDLL(str(LIBRARY))["_ZN7pyquant3cpu3isaEv"]
    before = in_use()
    for index in range(len(ISAS)):
        if engine.t_use_isa(index):
            assert engine.t_isa() == index
            assert in_use() == before
    assert list(variants(engine))


def variants(engine: ctypes.CDLL) -> Iterator[str]:
    """Every instruction set of this machine, alone and with three threads; the last state is the first one."""
    first = engine.t_isa()
    for index, name in enumerate(ISAS):
        if not engine.t_use_isa(index):
            continue
        for threads in (1, 3):
            engine.t_threads(threads)
            yield f"{name}, {threads} threads"
    engine.t_threads(1)
    engine.t_use_isa(first)


def generator(index: int) -> np.random.Generator:
    return np.random.default_rng([BASE_SEED, index])


def pick(rng: np.random.Generator, values: tuple) -> int:
    return values[rng.integers(len(values))]


def codes(rng: np.random.Generator, low: int, high: int, rows: int, cols: int) -> Array:
    """int64 codes: uniform, only the two ends, or one value everywhere."""
    mode = rng.integers(4)
    if mode == 0:
        return np.where(rng.integers(0, 2, (rows, cols)) == 1, low, high).astype(np.int64)
    if mode == 1:
        return np.full((rows, cols), low if rng.integers(2) else high, np.int64)
    return rng.integers(low, high + 1, (rows, cols))


def reals(rng: np.random.Generator, *size: int) -> Array:
    return (rng.standard_normal(size) * 2.0 ** rng.integers(-6, 7, size)).astype(np.float32)


def strided(a: Array, ld: int, fill: int = GUARD) -> Array:
    """a [rows, cols] in a buffer of rows * ld, the rest of it guard bytes."""
    buffer = np.full(len(a) * ld * a.itemsize, fill, np.uint8).view(a.dtype).reshape(len(a), ld)
    buffer[:, : a.shape[1]] = a
    return buffer


def equal(got: Array, want: Array, kind: int, what: str) -> None:
    a, b = canonical(got, kind), canonical(want, kind)
    if not np.array_equal(a, b):
        bad = np.argwhere(a != b)
        where = tuple(bad[0])
        values = f"got {got[where]!r}, want {want[where]!r}"
        raise AssertionError(f"{what}: {len(bad)} of {a.size} differ, first at {where}: {values}")


def finish_of(rng: np.random.Generator, m: int, n: int, groups: int, out: int) -> Finish:
    f = Finish(out=out)
    if out == S32:
        return f
    if rng.integers(4):
        f.w_scale = np.abs(reals(rng, n, groups) if groups else reals(rng, n)) * np.float32(2.0**-8)
    kind = rng.integers(3)
    if kind:
        f.x_scale = np.abs(reals(rng, m)) if kind == 1 else np.float32(abs(reals(rng, 1)[0])) * np.ones((), np.float32)
    if rng.integers(2):
        f.bias = reals(rng, n)
    if rng.integers(2):
        f.residual_type = pick(rng, FLOATS)
        f.residual = stored(reals(rng, m, n), f.residual_type)
    f.activation = int(rng.integers(6))
    f.clamp = (-0.75, 1.5)
    if out == S8:
        f.out_scale = np.array([2.0 ** rng.integers(-3, 8)], np.float32)
        f.out_zero = np.array([rng.integers(-20, 20)], np.int32) if rng.integers(2) else None
        f.out_range = ((-127, 127), (-128, 127), (-7, 7))[rng.integers(3)]
    return f


def run_gemm(engine: ctypes.CDLL, p: Gemm, x: Array, x_type: int, w: Array, w_type: int, ldw: int, ldo: int) -> Array:
    f = p.finish
    m, k, n = len(p.x), p.x.shape[1], len(p.w)
    out = np.full(m * ldo * np.dtype(STORAGE[f.out]).itemsize, GUARD, np.uint8).view(STORAGE[f.out]).reshape(m, ldo)
    residual = None if f.residual is None else strided(f.residual, n + 5)
    zero = None if p.zero is None else np.ascontiguousarray(p.zero.reshape(-1), np.int32)
    x_scale = None if f.x_scale is None else np.ascontiguousarray(f.x_scale.reshape(-1))
    sizes = (ctypes.c_int64 * 17)(
        m,
        n,
        k,
        x_type,
        w_type,
        f.out,
        x.shape[1],
        ldw,
        ldo,
        n + 5,
        p.group,
        f.x_scale is not None and f.x_scale.ndim == 1,
        p.zero is not None and p.zero.ndim == 1,
        f.residual_type,
        f.activation,
        *f.out_range,
    )
    operands = (x, w, x_scale, zero, f.w_scale, None, f.bias, residual, out, f.out_scale, f.out_zero)
    addresses = (ctypes.c_void_p * 11)(*(at(a) for a in operands))
    engine.t_gemm(sizes, addresses, ctypes.c_float(f.clamp[0]), ctypes.c_float(f.clamp[1]))
    guard = out[:, n:].view(np.uint8) if ldo > n else np.full(1, GUARD, np.uint8)
    assert (guard == GUARD).all(), "wrote beyond its columns"
    return out[:, :n]


@pytest.mark.parametrize("block", range(12))
def test_gemm_equals_the_reference(engine: ctypes.CDLL, block: int) -> None:
    for index in range(block * 40, block * 40 + 40):
        rng = generator(index)
        m, n, k = (pick(rng, SIZES) for _ in range(3))
        x_type, w_type = pick(rng, (S8, U8, S4)), pick(rng, (S8, S4))
        out = pick(rng, (F32, F16, BF16, S8, S32))
        group = pick(rng, GROUPS) if out != S32 and rng.integers(3) == 0 else 0
        k = k // group * group if group else k
        x = codes(rng, *{S8: (-128, 127), U8: (0, 255), S4: (-8, 7)}[x_type], m, k)
        w = codes(rng, *((-128, 127) if w_type == S8 else (-8, 7)), n, k)
        zero = None
        if rng.integers(2):
            zero = rng.integers(*((0, 256) if x_type == U8 else (-128, 128)), m if rng.integers(2) else ())
            zero = np.asarray(zero)
        p = Gemm(x, w, zero, group, finish_of(rng, m, n, k // group if group else 0, out))
        want = p.result()
        x_memory = strided(x.astype(np.uint8 if x_type == U8 else np.int8), k + pick(rng, (0, 1, 13)))
        w_memory = packed_nibbles(w) if w_type == S4 else w.astype(np.int8)
        w_memory = strided(w_memory, w_memory.shape[1] + pick(rng, (0, 3)))
        ldw = w_memory.shape[1] * (2 if w_type == S4 else 1)
        ldo = n + pick(rng, (0, 7))
        for variant in variants(engine):
            got = run_gemm(engine, p, x_memory, x_type, w_memory, w_type, ldw, ldo)
            equal(got, want, out, f"problem {index}: m={m} n={n} k={k} x={x_type} w={w_type} group={group} {variant}")


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


class Layer:
    """A random fused layer: spec, packed buffer, and the reference of its rows."""

    def __init__(self, engine: ctypes.CDLL, rng: np.random.Generator, n: int, k: int, w_bits: int, group: int) -> None:
        self.engine, self.n, self.k, self.w_bits, self.group = engine, n, k, w_bits, group
        self.static = bool(rng.integers(2))
        self.symmetric = bool(rng.integers(2))
        ranges = ((-127, 127), (-7, 7)) if self.symmetric else ((-128, 127), (-8, 7))
        self.x_range = ranges[rng.integers(2)]
        self.activation = int(rng.integers(6))
        self.codes_out = bool(rng.integers(3) == 0)
        self.w = codes(rng, *((-128, 127) if w_bits == 8 else (-8, 7)), n, k)
        self.w_scale = np.abs(reals(rng, n, k // group) if group else reals(rng, n)) * np.float32(2.0**-6)
        self.bias = reals(rng, n) if rng.integers(2) else None
        self.x_scale = np.array([2.0**-5 * 1.1], np.float32) if self.static else None
        self.x_zero = np.array([rng.integers(-5, 5)], np.int32) if self.static and not self.symmetric else None
        self.out_scale = np.array([3.7], np.float32) if self.codes_out else None
        self.out_zero = np.array([4], np.int32) if self.codes_out and rng.integers(2) else None
        self.spec = (ctypes.c_int64 * 16)(
            n,
            k,
            w_bits,
            group,
            self.static,
            *self.x_range,
            self.symmetric,
            self.activation,
            bits(-0.75),
            bits(1.5),
            self.bias is not None,
            self.codes_out,
            -127,
            127,
            0,
        )
        self.source = self.w.astype(np.int8) if w_bits == 8 else packed_nibbles(self.w)
        size = engine.t_packed_bytes(self.spec)
        self.packed = np.full(size + 64, GUARD, np.uint8)
        engine.t_pack_linear(
            self.spec,
            at(self.source),
            at(self.w_scale),
            at(self.bias),
            at(self.x_scale),
            at(self.x_zero),
            at(self.out_scale),
            at(self.out_zero),
            at(self.packed),
        )
        assert (self.packed[size:] == GUARD).all(), "packed beyond packed_bytes"

    def unpacked(self) -> Array:
        out = np.full_like(self.source, GUARD)
        self.engine.t_unpack_linear(self.spec, at(self.packed), at(out))
        return out

    def run(self, x: Array, x_type: int, out_type: int, residual: Array | None, residual_type: int) -> Array:
        out = np.zeros((len(x), self.n), STORAGE[out_type])
        self.engine.t_linear(
            self.spec,
            at(self.packed),
            at(x),
            x_type,
            ctypes.c_int64(len(x)),
            ctypes.c_int64(x.shape[1]),
            at(residual),
            residual_type,
            ctypes.c_int64(self.n),
            at(out),
            out_type,
        )
        return out

    def reference(self, x: Array, x_type: int, out_type: int, residual: Array | None, residual_type: int) -> Array:
        f = Finish(
            self.w_scale,
            None,
            self.bias,
            residual,
            residual_type,
            self.activation,
            (-0.75, 1.5),
            out_type,
            self.out_scale,
            self.out_zero,
        )
        zero = None if self.x_zero is None else np.asarray(self.x_zero[0], np.int64)
        if self.static:
            f.x_scale = self.x_scale.reshape(())
            recip = np.float32(1) / self.x_scale[0]
            q = x
            if x_type in FLOATS:
                q = code_from_real(widened(x, x_type), recip, 0 if zero is None else zero, *self.x_range)
            return Gemm(q.astype(np.int64), self.w, zero, self.group, f).result()
        real = widened(x, x_type)
        scale, zeros = row_params(real, self.symmetric, *self.x_range)
        f.x_scale = scale
        poisoned = np.isnan(scale)[:, None]
        recip = np.float32(1) / np.where(poisoned, np.float32(1), scale[:, None])
        q = code_from_real(np.where(poisoned, np.float32(0), real), recip, zeros[:, None], *self.x_range)
        return Gemm(q.astype(np.int64), self.w, zeros.astype(np.int64), self.group, f).result()


def rows_of(rng: np.random.Generator, m: int, k: int, x_type: int) -> Array:
    if x_type in (S8, U8):
        low, high = (-128, 127) if x_type == S8 else (0, 255)
        return codes(rng, low, high, m, k).astype(np.int8 if x_type == S8 else np.uint8)
    x = reals(rng, m, k) * np.float32(2.0) ** rng.integers(-8, 9, (m, 1)).astype(np.float32)
    if m and k and rng.integers(2):
        x[rng.integers(m), rng.integers(k)] = (np.nan, np.inf, -np.inf)[rng.integers(3)]
    if m and rng.integers(3) == 0:
        x[rng.integers(m)] = (0.0, -0.0, 2.0**-101, 2.0**-126)[rng.integers(4)]
    return stored(x, x_type)


@pytest.mark.parametrize("block", range(12))
def test_linear_equals_the_reference(engine: ctypes.CDLL, block: int) -> None:
    for index in range(10_000 + block * 25, 10_000 + block * 25 + 25):
        rng = generator(index)
        m, n, k = pick(rng, SIZES), pick(rng, SIZES), pick(rng, SIZES)
        w_bits = pick(rng, (8, 4))
        group = pick(rng, GROUPS) if rng.integers(2) else 0
        k = k // group * group if group else k
        layer = Layer(engine, rng, n, k, w_bits, group)
        x_type = pick(rng, (F32, F16, BF16, S8, U8)) if layer.static else pick(rng, FLOATS)
        out_type = S8 if layer.codes_out else pick(rng, FLOATS)
        residual_type = pick(rng, FLOATS)
        residual = stored(reals(rng, m, n), residual_type) if rng.integers(2) else None
        x = rows_of(rng, m, k, x_type)
        want = layer.reference(x, x_type, out_type, residual, residual_type)
        np.testing.assert_array_equal(layer.unpacked(), layer.source)
        for variant in variants(engine):
            got = layer.run(x, x_type, out_type, residual, residual_type)
            what = f"layer {index}: m={m} n={n} k={k} bits={w_bits} group={group} x={x_type} {variant}"
            equal(got, want, out_type, what)


def test_a_buffer_packed_by_one_instruction_set_is_the_buffer_of_all(engine: ctypes.CDLL) -> None:
    for w_bits, group in ((8, 0), (4, 0), (8, 12), (4, 12)):
        buffers = []
        for _ in variants(engine):
            layer = Layer(engine, generator(7), 130, 204, w_bits, group)
            buffers.append(layer.packed)
        assert all(np.array_equal(b, buffers[0]) for b in buffers)


@pytest.mark.parametrize(
    ("w_bits", "group", "m", "n", "k"),
    [
        (8, 0, 1500, 520, 768),
        (4, 0, 1500, 520, 768),
        (4, 128, 1500, 520, 768),
        (4, 12, 300, 520, 1200),
        (4, 0, 20, 700, 2500),
    ],
)
def test_large_layers_row_alone_is_row_in_batch(
    engine: ctypes.CDLL, w_bits: int, group: int, m: int, n: int, k: int
) -> None:
    """Large enough for several passes over the rows, int4 unpacked piece by piece, and a split between threads."""
    rng = generator(99)
    layer = Layer(engine, rng, n, k, w_bits, group)
    x = rows_of(rng, m, k, F32)
    out_type = S8 if layer.codes_out else F32
    want = layer.reference(x, F32, out_type, None, F32)
    for variant in variants(engine):
        if variant.startswith("scalar"):
            continue
        equal(layer.run(x, F32, out_type, None, F32), want, out_type, variant)
        for row in (0, 1, m // 2, m - 1):
            alone = layer.run(x[row : row + 1], F32, out_type, None, F32)
            equal(alone, want[row : row + 1], out_type, f"row {row} alone, {variant}")


@pytest.mark.parametrize("m", [1, 2, 3, 5, 17])
@pytest.mark.parametrize(("x_type", "x_code", "k"), [(S8, -128, 131_071), (S8, 127, 131_071), (U8, 255, 65_793)])
def test_k_at_its_bound(engine: ctypes.CDLL, m: int, x_type: int, x_code: int, k: int) -> None:
    x = np.full((m, k), x_code, np.uint8 if x_type == U8 else np.int8)
    w = np.full((3, k), -128, np.int8)
    want = np.full((m, 3), x_code * -128 * k, np.int64)
    assert abs(want).max() <= 2**31
    p = Gemm(x, w, None, 0, Finish(out=S32))
    for variant in variants(engine):
        got = run_gemm(engine, p, x, x_type, w, S8, k, 3)
        np.testing.assert_array_equal(got, want.astype(np.int32), err_msg=variant)


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("w_code", [-8, 7])
def test_long_int4_rows(engine: ctypes.CDLL, m: int, w_code: int) -> None:
    """Beyond 131072 codes the int4 kernel adds in pieces."""
    k = 400_001
    spec = (ctypes.c_int64 * 16)(2, k, 4, 0, 1, -128, 127, 1, 0, 0, 0, 0, 0, -127, 127, 0)
    packed = np.empty(engine.t_packed_bytes(spec), np.uint8)
    source, one = packed_nibbles(np.full((2, k), w_code)), np.ones(2, np.float32)
    engine.t_pack_linear(spec, at(source), at(one), at(None), at(one), at(None), at(None), at(None), at(packed))
    for x_code in (-128, 127):
        x = np.full((m, k), x_code, np.int8)
        want = np.full((m, 2), np.float32(x_code * w_code * k))
        for variant in variants(engine):
            out = np.zeros((m, 2), np.float32)
            size, ldr = (ctypes.c_int64(m), ctypes.c_int64(k)), ctypes.c_int64(2)
            engine.t_linear(spec, at(packed), at(x), S8, *size, at(None), F32, ldr, at(out), F32)
            np.testing.assert_array_equal(out, want, err_msg=variant)


@pytest.mark.parametrize("block", range(6))
def test_quantisers_equal_the_reference(engine: ctypes.CDLL, block: int) -> None:
    for index in range(20_000 + block * 30, 20_000 + block * 30 + 30):
        rng = generator(index)
        rows, cols, kind = pick(rng, SIZES), pick(rng, SIZES), pick(rng, FLOATS)
        granularity = int(rng.integers(3))  # tensor, rows, groups
        group = pick(rng, GROUPS) if granularity == 2 else 0
        cols = cols // group * group if group else cols
        x = rows_of(rng, rows, cols, kind)
        memory = strided(x, cols + pick(rng, (0, 3)))
        symmetric = bool(rng.integers(2))
        qmin, qmax = ((-127, 127), (-7, 7))[rng.integers(2)] if symmetric else ((-128, 127), (-8, 7))[rng.integers(2)]
        runs = {0: (1, rows * cols), 1: (rows, cols), 2: (rows * (cols // group if group else 0), group)}[granularity]
        real = widened(x, kind).reshape(runs)
        scale, zero = row_params(real, symmetric, qmin, qmax)
        finite = np.isfinite(scale)
        safe = np.where(finite, scale, np.float32(1))
        masked = np.where(finite[:, None], real, np.float32(0))
        want = code_from_real(masked, (np.float32(1) / safe)[:, None], zero[:, None], qmin, qmax).reshape(rows, cols)
        static_scale = np.full(runs[0], 0.037, np.float32)
        static_zero = rng.integers(qmin, qmax + 1, runs[0]).astype(np.int32)
        want_static = code_from_real(real, (np.float32(1) / static_scale)[:, None], static_zero[:, None], qmin, qmax)
        shifted = want_static.astype(np.int64) - static_zero[:, None]
        want_static = want_static.reshape(rows, cols)
        shape = (granularity, ctypes.c_int64(group))
        size = [ctypes.c_int64(v) for v in (rows, cols, memory.shape[1])]
        for variant in variants(engine):
            what = f"matrix {index}: {rows}x{cols} type {kind} granularity {granularity} group {group} {variant}"
            q, got_scale, got_zero = np.zeros((rows, cols), np.int8), np.zeros_like(scale), np.zeros_like(zero)
            engine.t_quantize_dynamic(
                at(memory), kind, *size, *shape, symmetric, qmin, qmax, at(q), at(got_scale), at(got_zero)
            )
            equal(got_scale, scale, F32, what)
            np.testing.assert_array_equal(got_zero, zero, err_msg=what)
            np.testing.assert_array_equal(q, want, err_msg=what)
            engine.t_quantize(at(memory), kind, *size, *shape, at(static_scale), at(static_zero), qmin, qmax, at(q))
            np.testing.assert_array_equal(q, want_static, err_msg=what)
            out_type = FLOATS[index % 3]
            out = np.zeros((rows, cols), STORAGE[out_type])
            engine.t_dequantize(
                at(q), S8, size[0], size[1], size[1], *shape, at(static_scale), at(static_zero), at(out), out_type
            )
            real_want = stored(shifted.astype(np.float32) * static_scale[:, None], out_type).reshape(rows, cols)
            equal(out, real_want, out_type, what)


def float_epilogue_sizes(f: Finish, n: int) -> list[int]:
    """What the harness reads first of a layer whose result stays float; its residual is dense."""
    return [n, f.activation, f.residual_type, n, f.out]


def int64s(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def test_float_epilogue_equals_the_reference(engine: ctypes.CDLL) -> None:
    for index in range(30_000, 30_120):
        rng = generator(index)
        m, n = pick(rng, SIZES), pick(rng, SIZES)
        out_type = pick(rng, FLOATS)
        f = finish_of(rng, m, n, 0, out_type)
        acc = reals(rng, m, n)
        if acc.size:
            acc.reshape(-1)[rng.integers(acc.size)] = (np.nan, np.inf, -np.inf, -0.0)[rng.integers(4)]
        want = f.float_steps(acc)
        sizes, clamp = int64s(*float_epilogue_sizes(f, n)), (ctypes.c_float * 2)(*f.clamp)
        for variant in variants(engine):
            out = np.zeros((m, n), STORAGE[out_type])
            engine.t_float_epilogue(sizes, ctypes.c_int64(m), at(acc), at(f.bias), clamp, at(f.residual), at(out))
            equal(out, want, out_type, f"epilogue {index}: {m}x{n} activation {f.activation} {variant}")


# Every way of the kernels: whole pieces a group, several groups a piece, groups that they do not take, ends within a
# piece, one column; rows in registers, and in one and two passes over a panel.
WEIGHT_ONLY_K = (1, 2, 7, 31, 64, 127, 128, 129, 255, 256, 257, 300, 512, 600)
WEIGHT_ONLY_GROUPS = (0, 0, 1, 3, 8, 16, 24, 32, 48, 64, 96, 128, 256)
WEIGHT_ONLY_ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 64, 65, 515)


def weight_only_bound(x: Array, w: Array, f: Finish, kind: int, bias: Array, residual: Array) -> tuple[Array, Array]:
    """docs/numerics.md 8: the exact result before rounding, and how far from it a result may lie."""
    exact = x @ w.T + bias
    size = np.abs(x) @ np.abs(w).T + np.abs(bias)
    if f.activation == 1:
        exact = np.maximum(exact, 0)
    exact, size = exact + residual, size + np.abs(residual)
    ulp = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}[kind]
    least = {F32: 2.0**-126, F16: 2.0**-24, BF16: 2.0**-126}[kind]
    return exact, 2 * max(x.shape[1], 1) * 2.0**-24 * size + ulp * np.abs(exact) + least


@pytest.mark.parametrize("block", range(4))
def test_weight_only_stays_within_its_bound(engine: ctypes.CDLL, block: int) -> None:
    for index in range(60_000 + block * 60, 60_000 + (block + 1) * 60):
        check_weight_only(engine, index)


def check_weight_only(engine: ctypes.CDLL, index: int) -> None:
    rng = generator(index)
    group, m, n = pick(rng, WEIGHT_ONLY_GROUPS), pick(rng, WEIGHT_ONLY_ROWS), pick(rng, (0, 1, 3, 17, 64, 65, 130))
    k = group * int(rng.integers(1, 6)) if group else pick(rng, WEIGHT_ONLY_K)
    type_, x_type, out_type = pick(rng, (S4, S8)), pick(rng, FLOATS), pick(rng, FLOATS)
    low, high = (-8, 7) if type_ == S4 else (-128, 127)
    codes_ = codes(rng, low, high, n, k)
    groups = k // group if group else 1
    scale = rng.uniform(0.01, 0.1, (n, groups)).astype(np.float32)
    zero = rng.integers(low, high + 1, (n, groups)).astype(np.int32) if rng.integers(2) else None
    x = stored(rng.standard_normal((m, k)).astype(np.float32), x_type)
    f = finish_of(rng, m, n, 0, out_type)
    f.activation %= 2
    shifted = codes_ - (0 if zero is None else zero.astype(np.int64).repeat(k // groups, axis=1))
    w = shifted.astype(np.float64) * scale.astype(np.float64).repeat(k // groups, axis=1)
    bias = np.zeros(n) if f.bias is None else f.bias.astype(np.float64)
    residual = np.zeros((m, n)) if f.residual is None else widened(f.residual, f.residual_type).astype(np.float64)
    exact, bound = weight_only_bound(widened(x, x_type).astype(np.float64), w, f, out_type, bias, residual)
    memory = packed_nibbles(codes_.astype(np.int8)) if type_ == S4 else codes_.astype(np.int8)
    memory, rows = strided(memory, memory.shape[1] + 3), strided(x, k + 5)
    sizes = int64s(*float_epilogue_sizes(f, n), k, type_, memory.shape[1], group, m, x_type, k + 5)
    clamp = (ctypes.c_float * 2)(*f.clamp)
    for variant in variants(engine):
        out = np.zeros((m, n), STORAGE[out_type])
        pointers = (at(memory), at(scale), at(zero), at(rows), at(f.bias), clamp, at(f.residual), at(out))
        engine.t_weight_only(sizes, *pointers)
        far = np.abs(widened(out, out_type).astype(np.float64) - exact) / bound
        what = f"weight only {index}: {m}x{n}x{k} type {type_} group {group} zero {zero is not None} {variant}"
        assert out.size == 0 or far.max() <= 1, f"{what}: {far.max()} times its bound"


@pytest.mark.parametrize("type_", [S4, S8], ids=["s4", "s8"])
@pytest.mark.parametrize("group", [0, 32, 48, 64, 128, 320, 384])
def test_weight_only_is_exact_for_whole_numbers(engine: ctypes.CDLL, type_: int, group: int) -> None:
    """Under scales that are powers of two: few rows and many, ends of blocks and of K, groups that end within a
    panel."""
    low, high = (-8, 7) if type_ == S4 else (-128, 127)
    for index, (m, n) in enumerate(((9, 1), (13, 65), (9, 70), (515, 130), (1, 70), (2, 3), (5, 130), (8, 65))):
        k = group * (5 if group < 100 else 3) if group else (5, 255, 261, 640)[index % 4]
        rng = generator(70_000 + 10 * group + index)
        codes_, groups = codes(rng, low, high, n, k), k // group if group else 1
        scale = np.exp2(rng.integers(-3, 4, (n, groups))).astype(np.float32)
        zero = rng.integers(low, high + 1, (n, groups)).astype(np.int32) if index % 2 else None
        x = rng.integers(-4, 5, (m, k)).astype(np.float32)
        shifted = codes_ - (0 if zero is None else zero.astype(np.int64).repeat(k // groups, axis=1))
        want = x.astype(np.float64) @ (shifted * scale.astype(np.float64).repeat(k // groups, axis=1)).T
        memory = packed_nibbles(codes_.astype(np.int8)) if type_ == S4 else codes_.astype(np.int8)
        memory, rows = strided(memory, memory.shape[1] + 3), strided(stored(x, BF16), k + 3)
        sizes = int64s(n, 0, F32, n, F32, k, type_, memory.shape[1], group, m, BF16, k + 3)
        for variant in variants(engine):
            out, none = np.full((m, n), np.nan, np.float32), at(None)
            clamp = (ctypes.c_float * 2)()
            engine.t_weight_only(sizes, at(memory), at(scale), at(zero), at(rows), none, clamp, none, at(out))
            assert (out == want).all(), (variant, m, n, k)


def test_weight_only_keeps_what_is_not_finite_in_its_row(engine: ctypes.CDLL) -> None:
    """A row with a NaN gives NaN in each channel, whatever its codes are, and its neighbours none."""
    for m, x_type in itertools.product((3, 20), FLOATS):
        x = np.ones((m, 130), np.float32)
        x[1, 129] = np.nan
        rows = stored(x, x_type)
        codes_, scale = np.zeros((70, 65), np.uint8), np.ones((70, 1), np.float32)
        sizes, clamp = int64s(70, 0, F32, 70, F32, 130, S4, 65, 0, m, x_type, 130), (ctypes.c_float * 2)()
        for variant in variants(engine):
            out = np.full((m, 70), 5, np.float32)
            none = at(None)
            engine.t_weight_only(sizes, at(codes_), at(scale), none, at(rows), none, clamp, none, at(out))
            assert np.isnan(out[1]).all(), variant
            assert (np.delete(out, 1, axis=0) == 0).all(), variant


def test_every_16_bit_float_is_widened_and_rounded_alike(engine: ctypes.CDLL) -> None:
    """All fp16 and bf16 patterns through a store, and their fp32 neighbours half way between."""
    every = np.arange(65536, dtype=np.uint32)
    bf16 = (every << 16).view(np.float32)
    halves = ((every << 16) | 0x8000).view(np.float32)
    f16 = every.astype(np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        above = np.nextafter(f16.astype(np.float16), np.float16(np.inf)).astype(np.float32)
        f16_halves = (f16 + above) * np.float32(0.5)
    acc = np.ascontiguousarray(np.stack([bf16, halves, f16, f16_halves]))
    for variant in variants(engine):
        for out_type in (F16, BF16):
            out = np.zeros(acc.shape, STORAGE[out_type])
            sizes, clamp = int64s(65536, 0, F32, 65536, out_type), (ctypes.c_float * 2)()
            engine.t_float_epilogue(sizes, ctypes.c_int64(4), at(acc), at(None), clamp, at(None), at(out))
            equal(out, stored(acc, out_type), out_type, variant)


def test_int4_packing_and_sums(engine: ctypes.CDLL) -> None:
    for index in range(40_000, 40_060):
        rng = generator(index)
        rows, cols, group = pick(rng, SIZES), pick(rng, SIZES), pick(rng, GROUPS)
        q = rng.integers(-8, 8, (rows, cols)).astype(np.int8)
        packed, back = np.zeros((rows, (cols + 1) // 2), np.uint8), np.zeros_like(q)
        size = (ctypes.c_int64(rows), ctypes.c_int64(cols))
        engine.t_pack_int4(at(q), *size, at(packed))
        np.testing.assert_array_equal(packed, packed_nibbles(q.astype(np.int64)))
        engine.t_unpack_int4(at(packed), *size, at(back))
        np.testing.assert_array_equal(back, q)
        k = cols // group * group
        for w, w_type, ldw in ((q, S8, cols), (packed, S4, 2 * packed.shape[1])):
            sums = np.zeros((rows, k // group), np.int32)
            extent = (ctypes.c_int64(k), ctypes.c_int64(ldw), ctypes.c_int64(group))
            engine.t_weight_sums(at(w), w_type, size[0], *extent, at(sums))
            want = q[:, :k].reshape(rows, k // group, group).sum(axis=2, dtype=np.int64)
            np.testing.assert_array_equal(sums, want)


def test_self_test_passes_on_every_instruction_set_here(engine: ctypes.CDLL) -> None:
    for index in range(len(ISAS)):
        if engine.t_use_isa(index):
            assert engine.t_self_test(index)
    list(variants(engine))


def report(folder: Path, allowed: str) -> str:
    script = (
        "import ctypes, sys; text = ctypes.create_string_buffer(2000); "
        "ctypes.CDLL(sys.argv[1]).t_report(text, ctypes.c_int64(2000)); print(text.value.decode())"
    )
    environment = os.environ | {"PYQUANT_CPU_ISA": allowed}
    command = [sys.executable, "-c", script, str(folder / "libcpu_engine.so")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_environment_caps_the_instruction_set(folder: Path, engine: ctypes.CDLL) -> None:
    here = [name for index, name in enumerate(ISAS) if engine.t_use_isa(index)]
    list(variants(engine))
    for name in here:
        in_use = [line for line in report(folder, name).splitlines() if line.endswith("in use")]
        assert [line.split(":")[0] for line in in_use] == [name]
    assert "'sse9'" in report(folder, "sse9")
    assert "allowed: scalar, avx2" in report(folder, "sse9")


SANITIZED = """
import sys
sys.path[:0] = sys.argv[2:]
import csrc.test_cpu_engine as suite
engine = suite.load(sys.argv[1])
for block in (0, 5):
    suite.test_gemm_equals_the_reference(engine, block)
    suite.test_linear_equals_the_reference(engine, block)
suite.test_quantisers_equal_the_reference(engine, 0)
suite.test_float_epilogue_equals_the_reference(engine)
suite.test_weight_only_stays_within_its_bound(engine, 0)
suite.test_int4_packing_and_sums(engine)
print("finished")
"""


@pytest.mark.nightly
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Reads beyond an operand leave no trace in the results: the address sanitizer sees them. On every instruction
    set; tests/sanitizers has the whole library, bindings included, on the one in use."""
    libraries = sanitizers.runtimes("asan", "ubsan")
    if libraries is None:
        pytest.skip("the compiler has no sanitizer libraries")
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    parts = objects(tmp_path, Path(__file__).with_name("cpu_harness.cpp"), flags)
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]
    command = [
        sys.executable,
        "-c",
        SANITIZED,
        str(link(tmp_path / "libcpu_engine.so", parts, "-shared", *flags)),
        *paths,
    ]
    environment = os.environ | {"LD_PRELOAD": libraries, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith("finished\n")


def test_convolutions(engine: ctypes.CDLL) -> None:
    for variant in variants(engine):
        for seed in range(2):
            try:
                conv_cases.check_library(engine, seed)
            except AssertionError as error:
                raise AssertionError(f"{variant}: {error}") from None
