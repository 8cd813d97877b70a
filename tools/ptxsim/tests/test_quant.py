"""Instructions of quantised GEMMs against references written here: packed arithmetic, conversions, matrix moves,
tensor cores in every size, cache hints, packed and scoped reductions, bulk copies in clusters; and what is refused."""

import ctypes
import re

import harness
import numpy as np
import pytest
from kernels import wgmma_all
from test_instr import BITS, E4M3, E5M2, ENC, RANGE, bf16, clamp, fma_exact, frag, lop3, s

pytestmark = pytest.mark.needs("quant")

rng = np.random.default_rng(7)
H16 = np.array(
    [
        0,
        0x8000,
        1,
        0x8001,
        0x3FF,
        0x400,
        0x3C00,
        0xBC00,
        0x3C01,
        0x4000,
        0x7BFF,
        0xFBFF,
        0x7C00,
        0xFC00,
        0x7E00,
        0xFE01,
        0x7F80,
        0xFF80,
        0x7FC0,
        0x3F80,
        0xBF80,
        0x0080,
        0x8080,
        0x00FF,
        0xFFFF,
        0x7FFF,
        0x1234,
    ],
    np.uint32,
)
A = np.concatenate(
    [np.repeat(H16, len(H16)) | np.tile(H16, len(H16)) << 16, rng.integers(0, 2**32, 1200, dtype=np.uint32)]
).astype(np.uint32)
B = np.concatenate(
    [np.tile(H16, len(H16)) | np.repeat(H16[::-1], len(H16)) << 16, rng.integers(0, 2**32, 1200, dtype=np.uint32)]
).astype(np.uint32)
C = np.concatenate(
    [rng.integers(0, 2**32, len(H16) ** 2, dtype=np.uint32), rng.integers(0, 2**32, 1200, dtype=np.uint32)]
)


def pair(f):
    return lambda a, b, c: (f(a & 0xFFFF, b & 0xFFFF) & 0xFFFF) | (f(a >> 16, b >> 16) & 0xFFFF) << 16


def s16(f):
    return pair(lambda x, y: f(s(x, 16), s(y, 16)))


def lanes(n, f, signed):
    b = 32 // n
    return lambda a, c, z: sum(
        (f(*(s(x >> b * i, b) if signed else x >> b * i & (1 << b) - 1 for x in (a, c))) & ((1 << b) - 1)) << b * i
        for i in range(n)
    )


def absdiff_add(a, b, c):
    return c + sum(abs(s(a >> 8 * i, 8) - s(b >> 8 * i, 8)) & 255 for i in range(4))


def fns(a, b, c):
    base, n = b & 31, (c & 7) - 3
    if n == 0:
        return base if a >> base & 1 else 2**32 - 1
    p = base
    while 0 <= p < 32:
        if a >> p & 1:
            n -= 1 if n > 0 else -1
            if n == 0:
                return p
        p += 1 if n > 0 else -1
    return 2**32 - 1


def szext(a, n, signed):
    if n == 0:
        return 0
    return a if n >= 32 else s(a, n) if signed else a & ((1 << n) - 1)


def x_lop3(a, b, c):
    r = lop3(a, b, c, 0x96)
    return r + int(r != 0 or s(c) < 0)


def x_lop3_and(a, b, c):
    r = a & b
    return r + int(r != 0 and not s(c) < 0)


INT = {
    "max_u16x2": pair(max),
    "max_s16x2": s16(max),
    "min_u16x2": pair(min),
    "min_s16x2": s16(min),
    "max_s16x2_relu": s16(lambda x, y: max(x, y, 0)),
    "min_s16x2_relu": s16(lambda x, y: max(min(x, y), 0)),
    "max_s32_relu": lambda a, b, c: max(s(a), s(b), 0),
    "add_s16x2": pair(lambda x, y: x + y),
    "v_absdiff4": lanes(4, lambda x, y: abs(x - y), False),
    "v_absdiff4_add": absdiff_add,
    "v_add4_sat": lanes(4, lambda x, y: clamp(x + y, -128, 127), True),
    "v_sub2": lanes(2, lambda x, y: x - y, False),
    "v_max2": lanes(2, max, False),
    "v_min4": lanes(4, min, True),
    "v_avrg4": lanes(4, lambda x, y: (x + y + 1) >> 1, False),
    "v_set4": lanes(4, lambda x, y: int(x > y), False),
    "x_lop3": x_lop3,
    "x_lop3_and": x_lop3_and,
    "x_fns": fns,
    "x_szext_s": lambda a, b, c: szext(a, b, True),
    "x_szext_u": lambda a, b, c: szext(a, b & 31, False),
    "cvt_wide_s32": lambda a, b, c: a ^ (2**32 - 1 if a >> 31 else 0),
    "cvt_wide_u32": lambda a, b, c: a,
    "cvt_wide_s8": lambda a, b, c: s(a, 8),
    "cvt_wide_u16": lambda a, b, c: a & 0xFFFF,
    "cvt_wide_f32": lambda a, b, c: int(np.array(s(a), np.int32).astype(np.float32).view(np.uint32)),
    "cvt_bf16_up": lambda a, b, c: (a & 0xFFFF) << 16,
}


@pytest.mark.parametrize("fn", list(INT))
def test_integer(sim, fn):
    b = B % 40 if "szext" in fn else B
    got = run(sim, fn, A, b, C)
    for x, y, z, g in zip(A.tolist(), b.tolist(), C.tolist(), got.tolist()):
        assert g == INT[fn](x, y, z) & 0xFFFFFFFF, (hex(x), hex(y), hex(z), hex(g))


def run(sim, fn, a, b, c, out=np.uint32):
    d = sim.empty(len(a) * 4)
    assert getattr(sim.lib("quant"), fn)(len(a), sim.dev(a), sim.dev(b), sim.dev(c), d) == 0, sim.report()
    return sim.host(d, len(a), out)


def dec_h(u):
    return u.astype(np.uint16).view(np.float16).astype(np.float64)


def enc_h(x):
    with np.errstate(all="ignore"):
        return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint32)


def dec_b(u):
    return (u.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def enc_b(x):
    """float64 (exact, or rounded to odd) to bfloat16, one rounding to nearest even."""
    with np.errstate(all="ignore"):
        f = x.astype(np.float32)
        f = np.where(np.abs(f.astype(np.float64)) > np.abs(x), np.nextafter(f, np.float32(0)), f)
        u = f.view(np.uint32) | ((f.astype(np.float64) != x) & np.isfinite(x)).astype(np.uint32)
        u = np.where(np.isinf(x), x.astype(np.float32).view(np.uint32), u)
        return np.where(np.isnan(x), 0x7FFF, (u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint32)


def flush(x):
    return np.where(np.abs(x) < 2.0**-14, np.copysign(0.0, x), x)


def zero_order(f, x, y):  # fmin and fmax with -0 below +0
    r = f(x, y)
    z = (x == 0) & (y == 0)
    neg = np.signbit(x) & np.signbit(y) if f in (np.fmax, np.maximum) else np.signbit(x) | np.signbit(y)
    return np.where(z, np.where(neg, -0.0, 0.0), r)


def xorsign(f):
    return lambda x, y, z: np.copysign(1.0, x) * np.copysign(1.0, y) * f(np.abs(x), np.abs(y))


def mm(f):
    return lambda x, y, z: zero_order(f, x, y)


def relu(v):
    return np.where(v <= 0, 0.0, v)


FLOAT = {
    "max_f16x2": mm(np.fmax),
    "max_nan_f16x2": mm(np.maximum),
    "min_f16x2": mm(np.fmin),
    "min_nan_f16x2": mm(np.minimum),
    "max_bf16x2": mm(np.fmax),
    "max_nan_bf16x2": mm(np.maximum),
    "min_bf16x2": mm(np.fmin),
    "min_nan_bf16x2": mm(np.minimum),
    "max_xs_f16x2": xorsign(np.fmax),
    "max_xs_bf16x2": xorsign(np.fmax),
    "min_nan_xs_bf16x2": xorsign(np.minimum),
    "add_f16x2": lambda x, y, z: x + y,
    "sub_f16x2": lambda x, y, z: x - y,
    "mul_f16x2": lambda x, y, z: x * y,
    "add_sat_f16x2": lambda x, y, z: np.where(np.isnan(x + y), 0.0, np.clip(x + y, 0, 1)),
    "mul_ftz_f16x2": lambda x, y, z: flush(dec_h(enc_h(flush(x) * flush(y)))),
    "add_bf16x2": lambda x, y, z: fma_exact(x, np.ones_like(x), y),
    "sub_bf16x2": lambda x, y, z: fma_exact(x, np.ones_like(x), -y),
    "mul_bf16x2": lambda x, y, z: x * y,
    "mul_bf16x2_plain": lambda x, y, z: x * y,
    "fma_sat_f16x2": lambda x, y, z: np.where(np.isnan(fma_exact(x, y, z)), 0.0, np.clip(fma_exact(x, y, z), 0, 1)),
    "fma_relu_f16x2": lambda x, y, z: relu(fma_exact(x, y, z)),
    "fma_ftz_f16x2": lambda x, y, z: flush(dec_h(enc_h(fma_exact(flush(x), flush(y), flush(z))))),
    "fma_bf16x2": fma_exact,
    "fma_relu_bf16x2": lambda x, y, z: relu(fma_exact(x, y, z)),
}


@pytest.mark.parametrize("fn", list(FLOAT))
def test_packed_float(sim, fn):
    got = run(sim, fn, A, B, C)
    dec, enc = (dec_b, enc_b) if "bf16" in fn else (dec_h, enc_h)
    with np.errstate(all="ignore"):
        for sh in (0, 16):
            x, y, z = (dec(v >> sh & 0xFFFF) for v in (A, B, C))
            g, e = got >> sh & 0xFFFF, enc(FLOAT[fn](x, y, z))
            ok = g == e
            if "sat" in fn or "relu" in fn or ("xs" not in fn and not fn.startswith(("max", "min"))):
                ok |= (
                    (dec(g) == 0)
                    & (dec(e) == 0)
                    & (
                        np.signbit(dec(g)) == np.signbit(dec(e))
                        if "fma" not in fn and "relu" not in fn and "sat" not in fn
                        else True
                    )
                )
            bad = np.flatnonzero(~ok)
            assert len(bad) == 0, [
                (hex(A[i] >> sh & 0xFFFF), hex(B[i] >> sh & 0xFFFF), hex(C[i] >> sh & 0xFFFF), hex(g[i]), hex(e[i]))
                for i in bad[:5]
            ]


def test_xorsign_f32(sim):
    f = np.concatenate(
        [
            np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40], np.float32),
            rng.standard_normal(400).astype(np.float32),
        ]
    )
    a, b = np.repeat(f, 20), np.resize(f[::-1], len(f) * 20)
    got = run(sim, "max_xs_f32", a.view(np.uint32), b.view(np.uint32), a.view(np.uint32), np.float32)
    with np.errstate(all="ignore"):
        e = (np.copysign(np.float32(1), a) * np.copysign(np.float32(1), b) * np.fmax(np.abs(a), np.abs(b))).astype(
            np.float32
        )
    both = np.isnan(a) & np.isnan(b)
    assert np.all((got == e) & (np.signbit(got) == np.signbit(e)) | both & np.isnan(got))


def test_cvt_packed(sim):
    f = np.concatenate(
        [A.view(np.float32), (rng.standard_normal(3000) * 2.0 ** rng.integers(-30, 30, 3000)).astype(np.float32)]
    )
    f = f[: len(f) // 2 * 2]
    g = f[::-1].copy()
    u, v = f.view(np.uint32), g.view(np.uint32)

    def relu32(x):
        return np.where(x <= 0, np.float32(0), x)

    with np.errstate(all="ignore"):
        assert np.array_equal(run(sim, "cvt_bf16_dn", u, v, v), bf16(f).astype(np.uint32))
        assert np.array_equal(
            run(sim, "cvt_bf16x2_relu", u, v, v), bf16(relu32(f)).astype(np.uint32) << 16 | bf16(relu32(g))
        )

        def rz(x):
            return np.where(np.isnan(x), 0x7FFF, x.view(np.uint32) >> 16)

        assert np.array_equal(run(sim, "cvt_bf16x2_rz", u, v, v), rz(f) << 16 | rz(g))
    i = np.concatenate([A, np.arange(-300, 300).astype(np.uint32)])
    assert np.array_equal(run(sim, "cvt_bf16_s32", i, i, i), enc_b(i.view(np.int32).astype(np.float64)))
    x = dec_b(A & 0xFFFF)
    with np.errstate(all="ignore"):
        e = np.where(np.isnan(x), 0, np.clip(np.rint(x), -(2.0**31), 2.0**31 - 1))
    assert np.array_equal(run(sim, "cvt_s32_bf16", A, B, C, np.int32), e.astype(np.int64).astype(np.int32))
    codes = np.arange(65536, dtype=np.uint32)
    got = run(sim, "cvt_e4m3_round", codes, codes, codes)

    def nan(c):
        return np.where(c & 0x7F == 0x7F, 0x7F, c)

    assert np.array_equal(got, nan(codes & 255) | nan(codes >> 8) << 8)
    got = run(sim, "cvt_e5m2_round", codes, codes, codes)

    def fin(c):
        return np.where(c & 0x7F > 0x7C, 0x7F, np.where(c & 0x7F == 0x7C, (c & 0x80) | 0x7B, c))  # infinity saturates

    assert np.array_equal(got, fin(codes & 255) | fin(codes >> 8) << 8)


def fragment(m):
    return m.reshape(32, 2)[:, 0] | m.reshape(32, 2)[:, 1].astype(np.uint32) << 16


@pytest.mark.parametrize("check", [None, 1])
def test_movmatrix(sim, check):
    sim.config(check=check)
    m = rng.integers(0, 65536, (8, 8)).astype(np.uint16)
    o = sim.empty(128)
    assert sim.lib("quant").movmatrix(sim.dev(fragment(m)), o) == 0, sim.report()
    assert np.array_equal(sim.host(o, 32, np.uint32), fragment(np.ascontiguousarray(m.T)))


def test_movmatrix_uninitialised(sim):
    """A value that was never written is followed through the transposition."""
    sim.config(check=1)
    assert sim.lib("quant").movmatrix(sim.empty(128), sim.empty(128)) != 0
    assert "never written" in sim.report()


@pytest.mark.parametrize(("n", "trans"), [(n, t) for n in (1, 2, 4) for t in (0, 1)])
def test_stmatrix(sim, n, trans):
    sim.config(check=1)
    m = rng.integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    o = sim.empty(512)
    assert sim.lib("quant").stmatrices(n, trans, sim.dev(np.stack([fragment(x) for x in m])), o) == 0, sim.report()
    e = m.transpose(0, 2, 1).copy() if trans else m.copy()
    e[n:] = 0
    assert np.array_equal(sim.host(o, (4, 8, 8), np.uint16), e)


MMAS = [
    ("mma_u8", "u8", "u8", 32),
    ("mma_s8u8", "s8", "u8", 32),
    ("mma_u8_k16", "u8", "s8", 16),
    ("mma_s4u4", "s4", "u4", 64),
    ("mma_u4s4_k32", "u4", "s4", 32),
    ("mma_s4_m8", "s4", "s4", 32),
    ("mma_bf16_k8", "bf16", "bf16", 8),
    ("mma_f16_k8_acc16", "f16", "f16", 8),
    ("mma_e4m3_acc16", "e4m3", "e4m3", 32),
    ("mma_e4m3e5m2", "e4m3", "e5m2", 32),
    ("mma_e5m2_acc16", "e5m2", "e5m2", 32),
    ("mma_tf32_k4", "tf32", "tf32", 4),
]


@pytest.mark.parametrize(("fn", "ta", "tb", "K"), MMAS, ids=[m[0] for m in MMAS])
def test_mma(sim, fn, ta, tb, K):
    M = 8 if fn.endswith("_m8") else 16
    X, Y, Z = (
        rng.integers(*RANGE.get(ta, (-4, 5)), (M, K)),
        rng.integers(*RANGE.get(tb, (-4, 5)), (8, K)),
        rng.integers(-100, 100, (M, 8)),
    )
    isint, half = ta in RANGE, fn.endswith("acc16")
    a, b, c = frag(X, BITS[ta], M == 16, ENC[ta]), frag(Y, BITS[tb], False, ENC[tb]), np.zeros((M // 4, 32), np.uint32)
    zi = Z.astype(np.int32).view(np.uint32) if isint else Z.astype(np.float32).view(np.uint32)
    zh = Z.astype(np.float16).view(np.uint16).astype(np.uint32)

    def place(r, lane):
        return (lane // 4 + 8 * r, (lane % 4) * 2) if half else (lane // 4 + 8 * (r >> 1), (lane % 4) * 2 + (r & 1))

    regs = 2 if half else M // 4
    for r in range(regs):
        for lane in range(32):
            i, j = place(r, lane)
            c[r, lane] = zh[i, j] | zh[i, j + 1] << 16 if half else zi[i, j]
    d = sim.empty(512)
    assert getattr(sim.lib("quant"), fn)(sim.dev(a), sim.dev(b), sim.dev(c), d) == 0, sim.report()
    got, ref = sim.host(d, (4, 32), np.uint32), X @ Y.T + Z
    rh, ri = (
        (ref if half else Z).astype(np.float16).view(np.uint16).astype(np.uint32),
        ref.astype(np.int32).view(np.uint32) if isint else ref.astype(np.float32).view(np.uint32),
    )
    for r in range(regs):
        for lane in range(32):
            i, j = place(r, lane)
            assert got[r, lane] == (rh[i, j] | rh[i, j + 1] << 16 if half else ri[i, j]), (r, lane)


CODES = {"f16": np.float16, "f16acc": np.float16, "bf16": "bf16", "e4m3": E4M3, "e5m2": E5M2, "s8": np.int8}


def wgmma_operand(x, kind):
    """A matrix of small integers in the instruction's type."""
    if kind == "s8":
        return x.astype(np.int8)
    if kind == "bf16":
        return bf16(x.astype(np.float32))
    if "f16" in kind:
        return x.astype(np.float16)
    codes = [np.searchsorted(CODES[kind][:120], abs(v)) | (128 if v < 0 else 0) for v in x.ravel()]
    return np.array(codes, np.uint8).reshape(x.shape)


def wgmma_accumulators(v, kind):
    """The words of a (64, N) matrix as the threads of a warpgroup hold them: (words, 128)."""
    half = kind == "f16acc"
    i, t = np.meshgrid(np.arange(v.shape[1] // (4 if half else 2)), np.arange(128), indexing="ij")
    row = t // 32 * 16 + t % 32 // 4
    if half:
        row, col = row + 8 * (i % 2), i // 2 * 8 + t % 4 * 2
        h = v.astype(np.float16).view(np.uint16).astype(np.uint32)
        return h[row, col] | h[row, col + 1] << 16
    row, col = row + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2
    return v.astype(np.int32 if kind == "s8" else np.float32)[row, col].view(np.uint32)


MODES = {"eager": {}, "lazy": {"async": "lazy"}, "check": {"check": 1}}


def wgmma_of_sizes(sim, library, kind, sizes):
    """A from shared memory and from registers."""
    lib = sim.lib(library)
    K = 16 if "f16" in kind else 32
    for n in sizes:
        X, Y, Z = rng.integers(-3, 4, (64, K)), rng.integers(-3, 4, (n, K)), rng.integers(-100, 100, (64, n))
        if kind == "s8":
            X, Y = rng.integers(-128, 128, (64, K)), rng.integers(-128, 128, (n, K))
        x, y, z = wgmma_operand(X, kind), wgmma_operand(Y, kind), wgmma_accumulators(Z, kind)
        d = sim.empty(2 * z.nbytes)
        assert getattr(lib, f"wg_{kind}_{n}")(sim.dev(x), sim.dev(y), sim.dev(z), d) == 0, sim.report()
        want = wgmma_accumulators(X @ Y.T + Z, kind)
        for got in sim.host(d, (2, *want.shape), np.uint32):
            assert np.array_equal(got, want), (n, np.argwhere(got != want)[:3].tolist())
        sim.free()


@pytest.mark.needs("wgmma_few")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CODES)
def test_wgmma_of_some_n(sim, kind, mode):
    sim.config(**MODES[mode])
    wgmma_of_sizes(sim, "wgmma_few", kind, wgmma_all.sizes(kind, 5))


@pytest.mark.nightly
@pytest.mark.needs("wgmma_all")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CODES)
def test_wgmma_of_every_n(sim, kind, mode):
    sim.config(**MODES[mode])
    wgmma_of_sizes(sim, "wgmma_all", kind, wgmma_all.sizes(kind, 1))


def test_warp(sim):
    v = rng.integers(1, 2**32, 32, dtype=np.uint32)
    L = np.arange(32)
    o = sim.empty(12 * 128)
    assert sim.lib("quant").warp2(sim.dev(v), o) == 0, sim.report()
    got = sim.host(o, (12, 32), np.uint32)

    def m(c):
        return sum(1 << i for i in range(32) if c[i])

    one = [np.bitwise_and.reduce(v), np.bitwise_or.reduce(v), v.min(), int(v.view(np.int32).max()) & 0xFFFFFFFF]
    exp = [np.full(32, x) for x in one] + [
        np.array([m((v & 1) == (x & 1)) for x in v]),
        np.full(32, int((v < 5).all() or not (v < 5).any())),
        np.ones(32),
        np.where(L >= 8, 8, 0),
        L == 8,
        np.where(L >= 8, sum(range(8, 32)), 0),
        np.ones(32),
        np.ones(32),
    ]
    for k, e in enumerate(exp):
        assert np.array_equal(got[k], np.asarray(e).astype(np.uint64).astype(np.uint32)), (k, got[k], e)


@pytest.mark.parametrize("check", [None, 1])
def test_cache_hints(sim, check):
    sim.config(check=check)
    a = rng.integers(0, 2**30, (64, 4), dtype=np.uint32)
    o = sim.empty(1024)
    assert sim.lib("quant").hints(sim.dev(a), o) == 0, sim.report()
    e = a * np.array([2, 2, 2, 1], np.uint32)
    e[:, 3] += a[:, 0] + a[:, 1]
    assert np.array_equal(sim.host(o, (64, 4), np.uint32), e)


@pytest.mark.parametrize("check", [None, 1])
def test_reductions(sim, check):
    sim.config(check=check)

    def z(n):
        return sim.dev(np.zeros(n, np.uint32))

    b2, h2, f4, bv, hm, u, old = z(1), z(1), sim.dev(np.zeros(4, np.float32)), z(4), z(2), z(4), z(64)
    assert sim.lib("quant").reds(b2, h2, f4, bv, hm, u, old) == 0, sim.report()

    def hf(p, n):
        return sim.host(p, n, np.float16).tolist()

    def bf(p, n):
        return dec_b(sim.host(p, n, np.uint16)).tolist()

    assert bf(b2, 2) == [192, 128]
    assert hf(h2, 2) == [128, 64]
    assert sim.host(f4, 4, np.float32).tolist() == [64, 128, 32, -64]
    assert bf(bv, 8) == [64, 64, 64, 64, 64, 128, 64, 128]
    assert hf(hm, 4) == [4, 1, 2, 1]
    r = sim.host(u, 4, np.uint32).tolist()
    assert r[:3] == [64, 128, 63]
    assert r[3] == 0x42800000
    assert len(set(sim.host(old, 64, np.uint32).tolist())) == 64


@pytest.mark.parametrize(
    "cfg",
    [{}, {"async": "lazy"}, {"async": "random:4", "sched": 2}, {"check": 1}, {"check": 1, "async": "lazy"}],
    ids=["eager", "lazy", "random", "check", "check-lazy"],
)
def test_cluster_copies(sim, cfg):
    sim.config(**cfg)
    a = rng.integers(0, 2**32, (2, 128), dtype=np.uint32)
    o = sim.empty(8 * 320 * 4)
    assert sim.lib("quant").dsmem(sim.dev(a), o) == 0, sim.report()
    got = sim.host(o, (8, 320), np.uint32)
    own = np.arange(4)[:, None] * 100 + np.arange(32)
    for i, g in enumerate(got):
        r, p = i % 4, (i % 4 - 1) % 4
        assert np.array_equal(g[:128], a[i // 4])
        assert g[288:296].tolist() == [p, p + 10, p + 20, p + 30, 15, 5, 5, 5]
        if r == 0:
            assert np.array_equal(g[128:256].reshape(4, 32), own)
            assert np.array_equal(g[256:288], 1000 + own.sum(0))


KINDS = {
    0: lambda o, x: o + x,
    1: np.minimum,
    2: np.maximum,
    3: lambda o, x: np.where(o >= x, 0, o + 1),
    4: np.bitwise_and,
    5: np.bitwise_xor,
}
TRED = (
    [(2, np.uint32, k) for k in KINDS]
    + [(3, np.int32, k) for k in (0, 1, 2)]
    + [(4, np.uint64, 0), (6, np.float16, 0), (6, np.float16, 1), (7, np.float32, 0), (9, "bf16", 0), (9, "bf16", 2)]
)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize(
    ("dtype", "dt", "kind"), TRED, ids=[f"{t[1] if isinstance(t[1], str) else t[1].__name__}-{t[2]}" for t in TRED]
)
def test_tensor_reduce(sim, dtype, dt, kind, mode):
    sim.config(**{"async": mode})
    w, h, bw, bh, x, y = 24, 10, 16, 4, 16, 8  # the box hangs over both edges
    lo = 0 if dt in (np.uint32, np.uint64) else -50
    o, t = rng.integers(lo, 60, (h, w)), rng.integers(lo, 60, (bh, bw))

    def raw(v):
        return bf16(v.astype(np.float32)) if dt == "bf16" else v.astype(dt)

    out = sim.dev(raw(o))
    es = 2 if dt == "bf16" else np.dtype(dt).itemsize
    assert sim.lib("quant").tensor_reduce(dtype, es, kind, out, w, h, bw, bh, x, y, sim.dev(raw(t))) == 0, sim.report()
    e = o.copy()
    e[y:, x:] = KINDS[kind](o[y:, x:], t[: h - y, : w - x])
    assert np.array_equal(sim.host(out, (h, w), np.uint16 if dt == "bf16" else dt), raw(e))


def test_bulk_reduce(sim):
    def i(lo, hi):
        return rng.integers(lo, hi, 32)

    xb, xh, ob, oh = i(-20, 20), i(-20, 20), i(-20, 20), i(-20, 20)
    xi, oi, xf, of = rng.integers(0, 9, 16), rng.integers(0, 9, 16), rng.integers(-9, 9, 16), rng.integers(-9, 9, 16)
    b, h = (lambda v: bf16(v.astype(np.float32))), (lambda v: v.astype(np.float16))
    src = np.concatenate(
        [b(xb).view(np.uint32), h(xh).view(np.uint32), xi.astype(np.uint32), xf.astype(np.float32).view(np.uint32)]
    )
    d = [sim.dev(v) for v in (b(ob), h(oh), oi.astype(np.uint32), of.astype(np.float32))]
    assert sim.lib("quant").bulk_reduce(sim.dev(src), *d) == 0, sim.report()
    assert np.array_equal(sim.host(d[0], 32, np.uint16), b(xb + ob))
    assert np.array_equal(sim.host(d[1], 32, np.float16), h(np.maximum(xh, oh)))
    assert np.array_equal(sim.host(d[2], 16, np.uint32), np.where(oi >= xi, 0, oi + 1))
    assert np.array_equal(sim.host(d[3], 16, np.float32), (xf + of).astype(np.float32))


def test_register_hand_over(sim):
    o = sim.empty(1024)
    assert sim.lib("quant").special(o) == 0, sim.report()
    assert np.array_equal(sim.host(o, 256, np.uint32), np.arange(256))


REFUSED = [  # PTX text, words of the report
    ("{.reg .b32 r; .reg .b64 a; multimem.ld_reduce.relaxed.sys.global.add.u32 r, [a];}", "of several devices"),
    ("{.reg .b32 r; .reg .b64 a; multimem.red.relaxed.sys.global.add.u32 [a], r;}", "multicast memory"),
    ("{.reg .b32 r; .reg .b64 a; multimem.st.weak.global.u32 [a], r;}", "multicast memory"),
    ("{.reg .b32 r<8>; .reg .b64 a; ld.global.v8.b32 {r0,r1,r2,r3,r4,r5,r6,r7}, [a];}", "sm_100"),
    ("{.reg .b64 r<4>; .reg .b64 a; st.global.v4.b64 [a], {r0,r1,r2,r3};}", "sm_100"),
    ("{.reg .b32 r; stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [r], {r};}", "sm_100"),
    ("{.reg .f32 r; redux.sync.max.f32 r, r, -1;}", "sm_100"),
    ("{.reg .f32 r; max.f32 r, r, r, r;}", "sm_100"),
    ("{.reg .f32 r; .reg .b16 h; add.rn.f32.bf16 r, h, r;}", "sm_100"),
    ("{.reg .b32 r; fma.rn.oob.f16x2 r, r, r, r;}", "'.oob'"),
    ("{.reg .b128 x; .reg .b64 a; atom.global.exch.b128 x, [a], x;}", "128-bit"),
    (
        (
            "{.reg .b32 d<20>; .reg .b64 a; "
            "wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8 {d0,d1,d2,d3,d4,d5,d6,d7,"
            "d8,d9,d10,d11,d12,d13,d14,d15,d16,d17,d18,d19}, a, a, 1;}"
        ),
        "no N of 40",
    ),
    (
        (
            "{.reg .b32 d<4>; .reg .b64 a; "
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.bf16 {d0,d1,d2,d3}, a, a, 1, 1, 1, 0, 0;}"
        ),
        "wgmma types",
    ),
    (
        (
            "{.reg .b32 d<4>; .reg .b64 a; "
            "wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.s8 {d0,d1,d2,d3}, a, a, d0, 0, 1;}"
        ),
        "sparse",
    ),
    (
        (
            "{.reg .b32 r; .reg .b64 a; "
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.f32 "
            "[r], [r], 16, [r];}"
        ),
        "integers only",
    ),
    ("{.reg .b32 r; frobnicate.b32 r, r;}", "unknown instruction"),
    (
        (
            "{.reg .b32 r; .reg .b64 a; "
            "cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
            "[r], [a, {r, r}], [r];}"
        ),
        "not supported",
    ),
    ("{.reg .b32 r; vadd.u32.u32.u32 r, r, r;}", "scalar video"),
]


def instruction(text):
    return re.search(r"; ([a-z_]+\.[\w.:]*?|frobnicate)[ .]", text.replace(".reg", "")).group(1)[:24]


@pytest.mark.parametrize(
    ("text", "words"), REFUSED, ids=[f"{instruction(text)}-{i}" for i, (text, _) in enumerate(REFUSED)]
)
def test_refused(sim, text, words, tmp_path):
    """A kernel with an instruction outside the supported set does not start, and the report names it."""
    src = (harness.BUILD / "quant.so").read_bytes()
    hole = re.search(rb"\{\.reg \.b32 z;( mov\.b32 z, 305419896;)+\}", src).group(0)
    assert len(text) <= len(hole)
    p = tmp_path / "refused.so"
    p.write_bytes(src.replace(hole, text.encode().ljust(len(hole))))
    assert ctypes.CDLL(str(p)).refuse(sim.dev(np.zeros(4, np.uint32))) != 0
    report = sim.report()
    assert words in report, report
    assert "PTX line" in report, report
