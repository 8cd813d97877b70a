"""Golden tests, one per instruction class, against references written here."""

import ctypes
import math

import numpy as np
import pytest

pytestmark = pytest.mark.needs("instr")

rng = np.random.default_rng(1)
EDGE = np.array(
    [
        0,
        1,
        2,
        3,
        31,
        32,
        33,
        64,
        255,
        256,
        0x7FFFFFFF,
        0x80000000,
        0x80000001,
        0xFFFFFFFF,
        0xFFFFFFFE,
        0x12345678,
        0x00FF00FF,
        0x80,
    ],
    np.uint32,
)
N = 700
A32 = np.concatenate([np.repeat(EDGE, 18), rng.integers(0, 2**32, N - 324, dtype=np.uint32)])
B32 = np.concatenate([np.tile(EDGE, 18), rng.integers(0, 2**32, N - 324, dtype=np.uint32)])
C32 = np.concatenate([rng.integers(0, 40, N // 2), rng.integers(0, 2**32, N - N // 2)]).astype(np.uint32)
M32 = 2**32 - 1


def s(x, b=32):
    x &= (1 << b) - 1
    return x - (1 << b) if x >> (b - 1) else x


def clamp(x, lo, hi):
    return max(lo, min(hi, x))


def tdiv(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bfe(a, p, n, signed):
    p, n = p & 255, n & 255
    if n == 0:
        return 0
    sb = (a >> min(p + n - 1, 31)) & 1 if signed else 0
    r = 0
    for i in range(32):
        r |= (((a >> (p + i)) & 1) if i < n and p + i <= 31 else sb) << i
    return r


def bfi(a, b, c, d):
    c, d = c & 255, d & 255
    for i in range(d):
        if c + i > 31:
            break
        b = b & ~(1 << (c + i)) | ((a >> i) & 1) << (c + i)
    return b


def prmt(a, b, c, mode):
    by = [(a | b << 32) >> (8 * i) & 255 for i in range(8)]
    k = c & 3
    if mode == "":
        out = []
        for i in range(4):
            n = c >> (4 * i) & 15
            v = by[n & 7]
            out.append((255 if v & 128 else 0) if n & 8 else v)
    else:
        sel = {
            "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
            "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
            "rc8": [[k] * 4 for k in range(4)],
            "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
            "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
            "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
        }[mode][k]
        out = [by[i] for i in sel]
    return sum(v << (8 * i) for i, v in enumerate(out))


def lop3(a, b, c, t):
    return sum((t >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


def dp4a(a, b, c, sa, sb):
    return c + sum(
        (s(a >> 8 * i, 8) if sa else a >> 8 * i & 255) * (s(b >> 8 * i, 8) if sb else b >> 8 * i & 255)
        for i in range(4)
    )


def halves(f):
    return lambda a, b, c: (f(a & 0xFFFF, b & 0xFFFF) & 0xFFFF) | (f(a >> 16, b >> 16) & 0xFFFF) << 16


INT = {
    "i_add": lambda a, b, c: a + b,
    "i_addsat": lambda a, b, c: clamp(s(a) + s(b), -(2**31), 2**31 - 1),
    "i_sub": lambda a, b, c: a - b,
    "i_mullo": lambda a, b, c: a * b,
    "i_mulhi_s": lambda a, b, c: s(a) * s(b) >> 32,
    "i_mulhi_u": lambda a, b, c: a * b >> 32,
    "i_mad": lambda a, b, c: a * b + c,
    "i_madhi": lambda a, b, c: (a * b >> 32) + c,
    "i_div_s": lambda a, b, c: -1 if b == 0 else tdiv(s(a), s(b)),
    "i_rem_s": lambda a, b, c: a if b == 0 else s(a) - tdiv(s(a), s(b)) * s(b),
    "i_div_u": lambda a, b, c: -1 if b == 0 else a // b,
    "i_rem_u": lambda a, b, c: a if b == 0 else a % b,
    "i_min_s": lambda a, b, c: min(s(a), s(b)),
    "i_max_u": lambda a, b, c: max(a, b),
    "i_sad": lambda a, b, c: c + abs(s(a) - s(b)),
    "i_abs": lambda a, b, c: abs(s(a)),
    "i_popc": lambda a, b, c: bin(a).count("1"),
    "i_clz": lambda a, b, c: 32 - a.bit_length(),
    "i_brev": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "i_bfind_s": lambda a, b, c: (a if s(a) >= 0 else ~a & M32).bit_length() - 1,
    "i_shl": lambda a, b, c: a << min(b, 32),
    "i_shr_s": lambda a, b, c: s(a) >> min(b, 31),
    "i_shr_u": lambda a, b, c: a >> min(b, 32),
    "i_shf_lw": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "i_shf_rc": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "i_bfe_u": lambda a, b, c: bfe(a, b, c, False),
    "i_bfe_s": lambda a, b, c: bfe(a, b, c, True),
    "i_bfi": lambda a, b, c: bfi(a, a, b, c),
    "i_prmt": lambda a, b, c: prmt(a, b, c, ""),
    **{f"i_prmt_{m}": (lambda a, b, c, m=m: prmt(a, b, c, m)) for m in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")},
    "i_lop3_e8": lambda a, b, c: lop3(a, b, c, 0xE8),
    "i_lop3_6a": lambda a, b, c: lop3(a, b, c, 0x6A),
    "i_dp4a_ss": lambda a, b, c: dp4a(a, b, c, 1, 1),
    "i_dp4a_us": lambda a, b, c: dp4a(a, b, c, 0, 1),
    "i_dp2a_lo": lambda a, b, c: c + s(a, 16) * s(b, 8) + s(a >> 16, 16) * s(b >> 8, 8),
    "i_carry": lambda a, b, c: c + (a + b >> 32),
    "i_borrow": lambda a, b, c: c - (1 if a < b else 0),
    "i_setp_lt": lambda a, b, c: c if s(a) < s(b) else a,
    "i_setp_and": lambda a, b, c: (int(b > c) + 2 * int(b <= c)) if s(a) < 0 else 0,
    "i_slct": lambda a, b, c: a if s(c) >= 0 else b,
    "i_set": lambda a, b, c: -1 if s(a) > s(b) else 0,
    "i_cvtpack": lambda a, b, c: (
        (clamp(s(a), -128, 127) & 255) << 8 | (clamp(s(b), -128, 127) & 255) | (c & 0xFFFF) << 16
    ),
    "i_cvt_sat": lambda a, b, c: clamp(s(a), -128, 127),
    "i_vadd16": halves(lambda x, y: x + y),
    "i_min16": halves(lambda x, y: min(s(x, 16), s(y, 16))),
    "i_not": lambda a, b, c: ~a,
    "i_cnot": lambda a, b, c: int(a == 0),
    "i_mul24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "i_bmsk": lambda a, b, c: 0 if a > 31 else ((1 << min(b, 32)) - 1) << a,
}


def run3(sim, fn, a, b, c, out):
    n = len(a)
    d = sim.empty(n * np.dtype(out).itemsize)
    rc = getattr(sim.lib("instr"), fn)(n, sim.dev(a), sim.dev(b), sim.dev(c), d)
    assert rc == 0, sim.report()
    return sim.host(d, n, out)


@pytest.mark.parametrize("fn", list(INT))
def test_int32(sim, fn):
    got = run3(sim, fn, A32, B32, C32, np.uint32)
    for a, b, c, g in zip(A32.tolist(), B32.tolist(), C32.tolist(), got.tolist()):
        assert g == INT[fn](a, b, c) & M32, (hex(a), hex(b), hex(c), hex(g), hex(INT[fn](a, b, c) & M32))


M64 = 2**64 - 1
LONG = {
    "l_add": lambda a, b, c: a + b,
    "l_mul": lambda a, b, c: a * b,
    "l_mulhi": lambda a, b, c: a * b >> 64,
    "l_div": lambda a, b, c: tdiv(s(a, 64), s(b, 64)) if b else -1,
    "l_remu": lambda a, b, c: a % b if b else a,
    "l_shr": lambda a, b, c: s(a, 64) >> min(b & M32, 63),
    "l_wide": lambda a, b, c: s(a) * s(b) + c,
    "l_pack": lambda a, b, c: a >> 32 | (b & M32) << 32,
}


@pytest.mark.parametrize("fn", list(LONG))
def test_int64(sim, fn):
    a, b, c = (
        rng.integers(0, 2**64, 300, dtype=np.uint64) >> rng.integers(0, 60, 300).astype(np.uint64) for _ in range(3)
    )
    got = run3(sim, fn, a, b, c, np.uint64)
    for x, y, z, g in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist()):
        assert g == LONG[fn](x, y, z) & M64, (x, y, z, g)


SPECIAL = np.array(
    [
        0,
        -0.0,
        1,
        -1,
        0.5,
        1.5,
        2.5,
        -2.5,
        1e-40,
        -1e-40,
        1e38,
        3e38,
        -3e38,
        np.inf,
        -np.inf,
        np.nan,
        127.5,
        128.49,
        -128.5,
        448,
        464,
        480,
        57344,
        61440,
        65504,
        65519,
        65520,
        2.0**-9,
        2.0**-10,
        2.0**-17,
        6e-8,
        2.9e-8,
        2147483648.0,
        -2147483648.0,
        4.3e9,
    ],
    np.float32,
)
FA = np.concatenate([np.repeat(SPECIAL, 35), (rng.standard_normal(600) * 2.0 ** rng.integers(-20, 20, 600))]).astype(
    np.float32
)
FB = np.concatenate([np.tile(SPECIAL, 35), (rng.standard_normal(600) * 2.0 ** rng.integers(-20, 20, 600))]).astype(
    np.float32
)
FC = (rng.standard_normal(len(FA)) * 2.0 ** rng.integers(-20, 20, len(FA))).astype(np.float32)


def fma_exact(a, b, c):
    """float64 rounding to odd of a*b+c, so that one further rounding is exact."""
    with np.errstate(all="ignore"):
        p = a.astype(np.float64) * b
        t = p + c
        bb = t - p
        e = (p - (t - bb)) + (c - bb)
        u = t.view(np.uint64).copy()
        fix = np.isfinite(t) & (e != 0) & (u & 1 == 0)
        up = (e > 0) == (t > 0)
        u = np.where(fix, np.where(up, u + 1, u - 1), u)
    return u.view(np.float64)


def directed(x64, mode):
    with np.errstate(all="ignore"):
        r = x64.astype(np.float32)
        if mode == "rz":
            return np.where(np.abs(r.astype(np.float64)) > np.abs(x64), np.nextafter(r, np.float32(0)), r)
        if mode == "rm":
            return np.where(r.astype(np.float64) > x64, np.nextafter(r, np.float32(-np.inf)), r)
        return np.where(r.astype(np.float64) < x64, np.nextafter(r, np.float32(np.inf)), r)


def ftz(x):
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


FLOAT = {
    "f_add": lambda a, b, c: a + b,
    "f_mul": lambda a, b, c: a * b,
    "f_fma": lambda a, b, c: fma_exact(a, b, c).astype(np.float32),
    "f_fma_rz": lambda a, b, c: directed(fma_exact(a, b, c), "rz"),
    "f_add_rm": lambda a, b, c: directed(fma_exact(a, np.ones_like(a), b), "rm"),
    "f_add_rp": lambda a, b, c: directed(fma_exact(a, np.ones_like(a), b), "rp"),
    "f_mul_ftz": lambda a, b, c: ftz(ftz(a) * ftz(b)),
    "f_mulsat": lambda a, b, c: np.where(np.isnan(a * b), 0, np.clip(a * b, 0, 1)).astype(np.float32),
    "f_min": lambda a, b, c: np.fmin(a, b),
    "f_maxnan": lambda a, b, c: np.maximum(a, b),
    "f_div": lambda a, b, c: a / b,
    "f_sqrt": lambda a, b, c: np.sqrt(a),
    "f_rni": lambda a, b, c: np.rint(a),
    "f_neg": lambda a, b, c: -a,
    "f_abs": lambda a, b, c: np.abs(a),
    "f_copysign": lambda a, b, c: np.copysign(b, a),
}


@pytest.mark.parametrize("fn", list(FLOAT))
def test_float(sim, fn):
    got = run3(sim, fn, FA, FB, FC, np.float32)
    with np.errstate(all="ignore"):
        ref = FLOAT[fn](FA, FB, FC).astype(np.float32)
    keep = np.ones(len(FA), bool)
    if fn in ("f_fma_rz", "f_add_rm", "f_add_rp"):  # directed rounding: finite results (overflow and signed zero aside)
        keep = np.isfinite(ref) & np.isfinite(got) & (ref != 0)
    same = (got == ref) | (np.isnan(got) & np.isnan(ref))
    if fn in ("f_add", "f_mul", "f_min", "f_neg"):
        same &= (np.signbit(got) == np.signbit(ref)) | np.isnan(ref) | ((fn == "f_min") & (ref == 0))
    bad = np.flatnonzero(~same & keep)
    assert len(bad) == 0, [(FA[i], FB[i], FC[i], got[i], ref[i]) for i in bad[:5]]


@pytest.mark.parametrize(
    ("fn", "ref"),
    [
        ("f_rcp", lambda x: 1 / x),
        ("f_rsqrt", lambda x: 1 / np.sqrt(x)),
        ("f_ex2", np.exp2),
        ("f_lg2", np.log2),
        ("f_tanh", np.tanh),
        ("f_sin", np.sin),
    ],
)
def test_approx(sim, fn, ref):
    x = np.abs(rng.standard_normal(500)).astype(np.float32) + np.float32(0.01)
    got = run3(sim, fn, x, x, x, np.float32)
    assert np.allclose(got, ref(x.astype(np.float64)), rtol=1e-6, atol=1e-6)


def rnd(a, mode):
    with np.errstate(all="ignore"):
        return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](a.astype(np.float64))


@pytest.mark.parametrize(
    ("fn", "mode", "lo", "hi", "bits"),
    [
        ("c_s32_rni", "rni", -(2**31), 2**31 - 1, 32),
        ("c_s32_rzi", "rzi", -(2**31), 2**31 - 1, 32),
        ("c_s32_rmi", "rmi", -(2**31), 2**31 - 1, 32),
        ("c_s32_rpi", "rpi", -(2**31), 2**31 - 1, 32),
        ("c_u32_rzi", "rzi", 0, 2**32 - 1, 32),
        ("c_s8_sat", "rni", -128, 127, 16),
        ("c_u8_sat", "rni", 0, 255, 16),
    ],
)
def test_cvt_int(sim, fn, mode, lo, hi, bits):
    got = run3(sim, fn, FA, FB, FC, np.uint32)
    for a, q, g in zip(FA.tolist(), rnd(FA, mode).tolist(), got.tolist()):
        e = 0 if math.isnan(a) else lo if q <= lo else hi if q >= hi else int(q)
        assert g == e & ((1 << bits) - 1), (a, hex(g), e)


def tables(E, M, inf):
    """All values of a small float format, by code."""
    out = []
    bias = 2 ** (E - 1) - 1
    for code in range(2 ** (E + M)):
        e, m = code >> M, code & (2**M - 1)
        if inf and e == 2**E - 1:
            v = math.inf if m == 0 else math.nan
        elif not inf and code == 2 ** (E + M) - 1:
            v = math.nan
        else:
            v = m * 2.0 ** (1 - bias - M) if e == 0 else (2**M + m) * 2.0 ** (e - bias - M)
        out.append(v)
    return np.array(out)


E4M3, E5M2 = tables(4, 3, False), tables(5, 2, True)


def to_fp8(x, tab):
    fin = tab[np.isfinite(tab)]
    r = np.zeros(len(x), np.uint32)
    for i, v in enumerate(x.astype(np.float64)):
        if np.isnan(v):
            r[i] = 0x7F
            continue
        a = min(abs(v), fin[-1])
        k = int(np.searchsorted(fin, a))
        if k and (
            k == len(fin)
            or abs(a - fin[k - 1]) < abs(fin[k] - a)
            or (abs(a - fin[k - 1]) == abs(fin[k] - a) and (k - 1) % 2 == 0)
        ):
            k -= 1
        r[i] = k | (0x80 if np.signbit(v) else 0)
    return r


def test_cvt_fp8(sim):
    for fn, tab in (("c_e4m3", E4M3), ("c_e5m2", E5M2)):
        got = run3(sim, fn, FA, FB, FC, np.uint32)
        assert np.array_equal(got, to_fp8(FA, tab) << 8 | to_fp8(FB, tab))
    h = np.arange(0, 65536, 7).astype(np.uint16).view(np.float16)
    h = h[~np.isnan(h)]
    got = run3(
        sim,
        "c_e4m3_h2",
        h.view(np.uint16).astype(np.uint32),
        h.view(np.uint16).astype(np.uint32),
        h.view(np.uint16).astype(np.uint32),
        np.uint32,
    )
    assert np.array_equal(got & 255, to_fp8(h, E4M3))
    codes = np.arange(65536, dtype=np.uint32)[::5]
    for fn, tab in (("c_e4m3_up", E4M3), ("c_e5m2_up", E5M2)):
        got = run3(sim, fn, codes, codes, codes, np.uint32)
        full = np.concatenate([tab, -tab]).astype(np.float16)
        for sh in (0, 8):
            g = (got >> (2 * sh) & 0xFFFF).astype(np.uint16).view(np.float16)
            e = full[codes >> sh & 255]
            assert np.all((g == e) & (np.signbit(g) == np.signbit(e)) | np.isnan(g) & np.isnan(e))


def bf16(x):
    u = x.astype(np.float32).view(np.uint32)
    r = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), r)


def test_cvt_half(sim):
    with np.errstate(all="ignore"):

        def h(x):
            return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16)).astype(np.uint32)

        def relu(x):
            return np.where(np.isnan(x), x, np.where(x <= 0, np.float32(0), x))

        assert np.array_equal(run3(sim, "c_f16", FA, FB, FC, np.uint32), h(FA))
        assert np.array_equal(run3(sim, "c_f16x2", FA, FB, FC, np.uint32), h(FA) << 16 | h(FB))
        assert np.array_equal(run3(sim, "c_f16x2_relu", FA, FB, FC, np.uint32), h(relu(FA)) << 16 | h(relu(FB)))
        assert np.array_equal(run3(sim, "c_bf16x2", FA, FB, FC, np.uint32), bf16(FA).astype(np.uint32) << 16 | bf16(FB))
        got = run3(sim, "c_f16_rz", FA, FB, FC, np.uint32).astype(np.uint16).view(np.float16)
        fin = np.isfinite(FA) & (np.abs(FA) <= 65504)
        assert np.all(np.abs(got[fin].astype(np.float64)) <= np.abs(FA[fin]))
        assert np.all(
            np.abs(
                np.nextafter(got[fin], np.copysign(np.float16(np.inf), FA[fin].astype(np.float16))).astype(np.float64)
            )
            > np.abs(FA[fin])
        )
        t = run3(sim, "c_tf32", FA, FB, FC, np.uint32)
        e = (FA.view(np.uint32) + 0x1000) & 0xFFFFE000
        ok = np.isfinite(FA) & (np.abs(FA) >= 2.0**-126)
        assert np.array_equal(t[ok], e[ok])


HB = rng.integers(0, 65536, 2000).astype(np.uint16)


def hv(u):
    return u.astype(np.uint16).view(np.float16)


def test_half2(sim):
    a, b, c = (rng.integers(0, 2**32, 3000, dtype=np.uint32) for _ in range(3))

    def expect(fn, f, dec, enc):
        got = run3(sim, fn, a, b, c, np.uint32)
        with np.errstate(all="ignore"):
            for sh in (0, 16):
                x, y, z = (dec(v >> sh & 0xFFFF) for v in (a, b, c))
                r, g = f(x, y, z), dec(got >> sh & 0xFFFF)
                q = enc(r)
                bad = ~((dec(q) == g) | (np.isnan(dec(q)) & np.isnan(g)))
                assert not bad.any(), (fn, x[bad][:3], y[bad][:3], z[bad][:3], g[bad][:3], dec(q)[bad][:3])

    def d64(u):
        return hv(u).astype(np.float64)

    def h(r):
        return r.astype(np.float16).view(np.uint16)

    expect("h_add2", lambda x, y, z: x + y, d64, h)
    expect("h_mul2", lambda x, y, z: x * y, d64, h)
    expect("h_fma2", fma_exact, d64, h)
    expect("h_fma2_relu", lambda x, y, z: np.where(fma_exact(x, y, z) <= 0, 0.0, fma_exact(x, y, z)), d64, h)
    expect("h_max2", lambda x, y, z: np.fmax(x, y), d64, h)
    expect("h_neg2", lambda x, y, z: -x, d64, h)

    def db(u):
        return (u.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def bf_enc(r):  # round to nearest even from float64, via a round-to-odd float32
        f = directed(r, "rz")
        u = f.view(np.uint32) | ((f.astype(np.float64) != r) & np.isfinite(r)).astype(np.uint32)
        u = np.where(np.isinf(r), r.astype(np.float32).view(np.uint32), u)
        return np.where(np.isnan(r), 0x7FFF, (u + 0x7FFF + ((u >> 16) & 1)) >> 16)

    expect("b_fma2", fma_exact, db, bf_enc)
    expect("b_min2", lambda x, y, z: np.fmin(x, y), db, bf_enc)
    got = run3(sim, "h_setp2", a, b, c, np.uint32)
    with np.errstate(all="ignore"):
        assert np.array_equal(
            got, (hv(a & 0xFFFF) > hv(b & 0xFFFF)) + 2 * (hv(a >> 16) > hv(b >> 16)).astype(np.uint32)
        )


def test_warp(sim):
    v = rng.integers(0, 2**31, 32).astype(np.uint32)
    L = np.arange(32)
    d = sim.empty(32 * 22 * 4)
    assert sim.lib("instr").warp_ops(sim.dev(v), d) == 0, sim.report()
    got = sim.host(d, (22, 32), np.uint32)

    def idx(j):
        return v[j]

    def m(c):
        return sum(1 << i for i in range(32) if c[i])

    exp = [
        idx(L * 7 & 31),
        idx(np.where(L >= 3, L - 3, L)),
        idx(np.where((L & 15) + 5 < 16, L + 5, L)),
        idx(L ^ 9),
        idx((L & 24) | 5),
        idx(np.where(L >= 4, L - 4, L)),
        (L >= 4).astype(int),
        np.full(32, m(v & 1)),
        np.full(32, int((v > 0).all())),
        np.full(32, 1),
        np.array([m((v & 3) == (x & 3)) for x in v]),
        np.full(32, M32),
        np.full(32, 1),
        np.full(32, int(v.astype(np.uint64).sum()) & M32),
        np.full(32, v.min()),
        np.full(32, v.max()),
        np.full(32, np.bitwise_xor.reduce(v)),
        np.zeros(32),
        (L == 0).astype(int),
        np.array(
            [
                (0x49249249 + int(v[6])) & M32
                if i % 3 == 0
                else m([(v[j] & 2) and j % 3 == 1 for j in L])
                if i % 3 == 1
                else 0
                for i in L
            ]
        ),
        (1 << L) - 1,
        np.array([M32 & ~((1 << int(i)) - 1) for i in L]),
    ]
    for k, e in enumerate(exp):
        assert np.array_equal(got[k], np.asarray(e).astype(np.uint64).astype(np.uint32)), (k, got[k], e)


def test_control_flow(sim):
    n = 500
    v = rng.integers(0, 2**32, n, dtype=np.uint32)
    tab = [1, 2, 4, 8, 16, 32, 64, 128, 3, 5, 7, 11, 13, 17, 19, 23]
    d = sim.empty(n * 4)
    assert sim.lib("instr").control(n, sim.dev(v), d) == 0, sim.report()
    for x, g in zip(v.tolist(), sim.host(d, n, np.uint32).tolist()):
        k = x % 9
        r = [
            x * 3,
            x + 100,
            sum(i * i for i in range(x % 17)),
            ~x,
            x >> 3,
            x ^ 0x55,
            0,
            tab[x & 15],
            [7, 8, 9, 10][x & 3],
        ][k]
        if k == 6:
            r = 1 if x & 1 else 2
            while not x & 1 and r < x % 1000:
                r *= 3
        r &= M32
        loc = [(r + i * x) & M32 for i in range(8)]
        r += loc[x & 7] ^ loc[x >> 3 & 7]
        r += x * x + 1 + sum(i * x for i in range(x & 7))
        assert g == r & M32


def test_progress(sim):
    lock, cnt = sim.dev(np.zeros(1, np.uint32)), sim.dev(np.zeros(1, np.uint32))
    assert sim.lib("instr").spin_lock(lock, cnt, 5) == 0, sim.report()
    assert sim.host(cnt, 1, np.uint32)[0] == 320
    n = 40
    out = sim.empty(n * 64 * 4)
    assert sim.lib("instr").grid_barrier(sim.dev(np.zeros(1, np.uint32)), sim.empty(n * 64 * 4), out, n) == 0, (
        sim.report()
    )
    assert np.array_equal(sim.host(out, (n, 64), np.uint32), ((np.arange(n)[:, None] + 1) % n) * 1000 + np.arange(64))


def test_atomics(sim):
    g0 = np.zeros(16, np.uint32)
    g0[1:4] = [5, 2000, M32]
    g, gf, gl, gh, old = (
        sim.dev(g0),
        sim.dev(np.zeros(4, np.float32)),
        sim.dev(np.zeros(1, np.uint64)),
        sim.dev(np.zeros(2, np.float16)),
        sim.empty(512),
    )
    assert sim.lib("instr").atomics(g, gf, gl, gh, old) == 0, sim.report()
    r = sim.host(g, 16, np.uint32).tolist()
    x = 0
    for t in range(128):
        x ^= t * 77
    dec = 0
    for _ in range(128):
        dec = 5 if dec == 0 or dec > 5 else dec - 1
    assert r[:8] == [8128, 117, 873, 0, M32, x, 8, dec]
    assert r[8:12] == [32] * 4
    assert sim.host(gf, 4, np.float32).tolist() == [64, 32, 128, 256]
    assert sim.host(gl, 1, np.uint64)[0] == 8128 << 30
    assert sim.host(gh, 2, np.float16).tolist() == [128, 256]
    assert sorted(sim.host(old, 128, np.uint32).tolist()) == sorted(i % 10 for i in range(128))


def test_barriers(sim):
    for cfg in ({}, {"sched": 4}, {"check": 1}):
        sim.config(**cfg)
        out = sim.empty(1024)
        assert sim.lib("instr").barriers(out) == 0, sim.report()
        t = np.arange(256)
        v = 255 - t
        v[128:] += (255 - t[:128]) + 1
        assert np.array_equal(sim.host(out, 256, np.uint32), v + 86 * 1000 + 300000)


def test_vector_access(sim):
    n = 100
    a = rng.integers(0, 2**32, (n, 4), dtype=np.uint32)
    b = rng.integers(0, 256, (n, 4)).astype(np.uint8)
    o, ob = sim.empty(n * 16), sim.empty(n)
    assert sim.lib("instr").vectors(n, sim.dev(a), o, sim.dev(b), ob) == 0, sim.report()
    e = a.copy()
    e[:, 0] += a[:, 3]
    e[:, 1] ^= a[:, 2]
    h = b.view(np.int16)
    assert np.array_equal(sim.host(o, (n, 4), np.uint32), e)
    assert np.array_equal(sim.host(ob, n, np.int8), (h[:, 0].astype(int) + h[:, 1]).astype(np.int8))


def test_matrices(sim):
    m = rng.integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    d, o2, o3 = sim.empty(192 * 4), sim.empty(512), sim.empty(512)
    assert sim.lib("instr").matrices(sim.dev(m), d, o2, o3) == 0, sim.report()
    got = sim.host(d, (6, 32), np.uint32)
    for i in range(4):
        assert np.array_equal(got[i], m[i].reshape(32, 2)[:, 0] | m[i].reshape(32, 2)[:, 1].astype(np.uint32) << 16)
    for i in range(2):
        t = np.ascontiguousarray(m[i].T).reshape(32, 2)
        assert np.array_equal(got[4 + i], t[:, 0] | t[:, 1].astype(np.uint32) << 16)
    assert np.array_equal(sim.host(o2, (4, 8, 8), np.uint16), m)
    assert np.array_equal(sim.host(o3, (4, 8, 8), np.uint16), m.transpose(0, 2, 1))


def frag(mat, bits, rows16, enc):
    """Fragments of a row-major (rows x K) operand: per register and lane, 32/bits consecutive k."""
    e = 32 // bits
    rows, K = mat.shape
    nk = K // (4 * e)
    out = np.zeros((nk * (rows // 8), 32), np.uint32)
    for r in range(out.shape[0]):
        hi, kk = (r & 1, r >> 1) if rows16 else (0, r)
        for lane in range(32):
            row, k0 = lane // 4 + 8 * hi, (lane % 4) * e + kk * 4 * e
            for j in range(e):
                out[r, lane] |= np.uint32(enc(mat[row, k0 + j])) << np.uint32(bits * j)
    return out


ENC = {
    "s8": lambda x: int(x) & 255,
    "u8": lambda x: int(x) & 255,
    "s4": lambda x: int(x) & 15,
    "u4": lambda x: int(x) & 15,
    "f16": lambda x: int(np.float16(x).view(np.uint16)),
    "bf16": lambda x: int(np.float32(x).view(np.uint32)) >> 16,
    "tf32": lambda x: int(np.float32(x).view(np.uint32)),
    "e4m3": lambda x: int(to_fp8(np.array([x]), E4M3)[0]),
    "e5m2": lambda x: int(to_fp8(np.array([x]), E5M2)[0]),
    "b1": lambda x: int(x) & 1,
}
RANGE = {"s8": (-128, 128), "u8": (0, 256), "s4": (-8, 8), "u4": (0, 16), "b1": (0, 2)}
BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "b1": 1}
MMAS = [
    ("mma_s8", "s8", "s8", 32),
    ("mma_u8s8", "u8", "s8", 32),
    ("mma_s8_sat", "s8", "s8", 32),
    ("mma_s8_k16", "s8", "s8", 16),
    ("mma_s4", "s4", "s4", 64),
    ("mma_u4", "u4", "u4", 64),
    ("mma_s4_k32", "s4", "s4", 32),
    ("mma_s8_m8", "s8", "s8", 16),
    ("mma_f16", "f16", "f16", 16),
    ("mma_f16_k8", "f16", "f16", 8),
    ("mma_f16_acc16", "f16", "f16", 16),
    ("mma_bf16", "bf16", "bf16", 16),
    ("mma_tf32", "tf32", "tf32", 8),
    ("mma_e4m3", "e4m3", "e4m3", 32),
    ("mma_e5m2", "e5m2", "e4m3", 32),
    ("mma_b1", "b1", "b1", 256),
]


@pytest.mark.parametrize(("fn", "ta", "tb", "K"), MMAS, ids=[m[0] for m in MMAS])
def test_mma(sim, fn, ta, tb, K):
    M = 8 if fn.endswith("_m8") else 16
    A, B = rng.integers(*RANGE.get(ta, (-4, 5)), (M, K)), rng.integers(*RANGE.get(tb, (-4, 5)), (8, K))
    isint = ta in RANGE
    Cm = rng.integers(-100, 100, (M, 8))
    if fn == "mma_s8_sat":
        Cm[:] = 2**31 - 1000
    a, b = frag(A, BITS[ta], M == 16, ENC[ta]), frag(B, BITS[tb], False, ENC[tb])
    acc16 = fn.endswith("acc16")
    ci = Cm.astype(np.int32).view(np.uint32) if isint else Cm.astype(np.float32).view(np.uint32)
    c = np.zeros((M // 4, 32), np.uint32)
    for r in range(M // 4):
        for lane in range(32):
            if acc16 and r < 2:
                h = Cm[lane // 4 + 8 * r, (lane % 4) * 2 : (lane % 4) * 2 + 2].astype(np.float16).view(np.uint16)
                c[r, lane] = int(h[0]) | int(h[1]) << 16
            elif not acc16:
                c[r, lane] = ci[lane // 4 + 8 * (r >> 1), (lane % 4) * 2 + (r & 1)]
    d = sim.empty(512)
    assert getattr(sim.lib("instr"), fn)(sim.dev(a), sim.dev(b), sim.dev(c), d) == 0, sim.report()
    got = sim.host(d, (4, 32), np.uint32)
    ref = A @ B.T + Cm
    if fn == "mma_s8_sat":
        ref = np.clip(ref, -(2**31), 2**31 - 1)
    for r in range(2 if acc16 else M // 4):
        for lane in range(32):
            if acc16:
                v = np.array([got[r, lane] & 0xFFFF, got[r, lane] >> 16]).astype(np.uint16).view(np.float16)
                assert list(v) == list(ref[lane // 4 + 8 * r, (lane % 4) * 2 : (lane % 4) * 2 + 2].astype(np.float16))
            else:
                v = got[r, lane].view(np.int32) if isint else got[r, lane].view(np.float32)
                assert v == ref[lane // 4 + 8 * (r >> 1), (lane % 4) * 2 + (r & 1)], (r, lane)


WGS = [
    ("wg_f16", "f16", "f16"),
    ("wg_f16_negA", "f16", "f16"),
    ("wg_f16_zero", "f16", "f16"),
    ("wg_bf16", "bf16", "bf16"),
    ("wg_tf32", "tf32", "tf32"),
    ("wg_e4m3", "e4m3", "e4m3"),
    ("wg_e5m2", "e5m2", "e4m3"),
    ("wg_s8", "s8", "s8"),
    ("wg_u8s8", "u8", "s8"),
    ("wg_s8_sat", "s8", "s8"),
]


@pytest.mark.parametrize("mode", ["eager", "lazy", "check"])
@pytest.mark.parametrize(("fn", "ta", "tb"), WGS, ids=[w[0] for w in WGS])
def test_wgmma(sim, fn, ta, tb, mode):
    sim.config(**({"check": 1} if mode == "check" else {"async": mode}))
    K = 256 // BITS[ta]
    A, B = rng.integers(*RANGE.get(ta, (-4, 5)), (64, K)), rng.integers(*RANGE.get(tb, (-4, 5)), (8, K))
    isint = ta in RANGE
    Cm = np.full((64, 8), 2**31 - 500) if fn.endswith("sat") else rng.integers(-100, 100, (64, 8))

    def raw(x, t):
        return np.array([[ENC[t](v) for v in row] for row in x]).astype(
            {8: np.uint8, 16: np.uint16, 32: np.uint32}[BITS[t]]
        )

    dt = np.int32 if isint else np.float32
    d = sim.empty(2048)
    assert getattr(sim.lib("instr"), fn)(sim.dev(raw(A, ta)), sim.dev(raw(B, tb)), sim.dev(Cm.astype(dt)), d) == 0, (
        sim.report()
    )
    ref = (-1 if "neg" in fn else 1) * (A @ B.T) + (0 if "zero" in fn else Cm)
    if fn.endswith("sat"):
        ref = np.clip(ref, -(2**31), 2**31 - 1)
    assert np.array_equal(sim.host(d, (64, 8), dt), ref.astype(dt))


@pytest.mark.parametrize("mode", ["eager", "lazy", "random:3"])
def test_async_copies(sim, mode):
    sim.config(**{"async": mode})
    a = rng.integers(0, 256, 2560).astype(np.uint8)
    for valid in (2048, 1000, 0):
        d = sim.empty(2560)
        assert sim.lib("instr").cp_async(sim.dev(a), d, valid) == 0, sim.report()
        e = a.copy()
        e[valid:2048] = 0
        assert np.array_equal(sim.host(d, 2560, np.uint8), np.concatenate([np.roll(e[:2048], -16), e[2048:]]))
    a = rng.integers(0, 256, 4096).astype(np.uint8)
    d, r = sim.empty(4096), sim.dev(np.arange(64, dtype=np.uint32))
    assert sim.lib("instr").bulk(sim.dev(a), d, r) == 0, sim.report()
    assert np.array_equal(sim.host(d, 4096, np.uint8), a ^ 0x5A)
    assert np.array_equal(sim.host(r, 64, np.uint32), (a ^ 0x5A).view(np.uint32)[:64] + np.arange(64, dtype=np.uint32))


TMA = [
    (1, 0, 1, 0, (100 * 16,), (64,), (32,)),
    (2, 6, 2, 3, (64, 40), (64, 16), (0, 8)),
    (2, 6, 2, 3, (80, 40), (64, 16), (32, 30)),
    (2, 6, 2, 2, (80, 40), (32, 24), (-8, -3)),
    (2, 0, 1, 1, (64, 40), (32, 16), (16, 2)),
    (2, 7, 4, 0, (20, 9), (8, 8), (16, 4)),
    (3, 9, 2, 3, (64, 10, 5), (64, 8, 2), (0, 5, 3)),
    (4, 2, 4, 0, (8, 6, 5, 4), (4, 3, 2, 2), (4, 2, 4, 3)),
    (5, 6, 2, 1, (16, 5, 4, 3, 3), (16, 2, 2, 2, 2), (0, 4, -1, 1, 2)),
]


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("case", TMA, ids=[f"{c[0]}d-sw{c[3]}-{i}" for i, c in enumerate(TMA)])
def test_tma(sim, case, mode):
    sim.config(**{"async": mode})
    dims, dtype, es, sw, shape, box, co = case
    dt = {1: np.uint8, 2: np.uint16, 4: np.uint32}[es]
    src = rng.integers(1, 255, shape[::-1]).astype(dt)
    nb = int(np.prod(box)) * es
    raw, out = sim.empty(nb), sim.dev(np.zeros_like(src))

    def arr(t, v):
        return (t * 5)(*v)

    assert (
        sim.lib("instr").tma(
            dims,
            dtype,
            es,
            sw,
            sim.dev(src),
            out,
            arr(ctypes.c_uint64, shape),
            arr(ctypes.c_uint32, box),
            arr(ctypes.c_int, co),
            raw,
        )
        == 0
    ), sim.report()
    tile, back = np.zeros(box[::-1], dt), np.zeros_like(src)
    for j in np.ndindex(*box[::-1]):
        g = tuple(c + k for c, k in zip(co[::-1], j))
        if all(0 <= x < n for x, n in zip(g, src.shape)):
            tile[j] = back[g] = src[g]
    lin = np.ascontiguousarray(tile).view(np.uint8).ravel()
    exp = np.empty_like(lin)
    o = np.arange(nb)
    exp[o ^ ((o >> 7 & {0: 0, 1: 1, 2: 3, 3: 7}[sw]) << 4)] = lin
    assert np.array_equal(sim.host(raw, nb, np.uint8), exp)
    assert np.array_equal(sim.host(out, src.shape, dt), back)


@pytest.mark.parametrize("cfg", [{}, {"sched": 9}, {"check": 1}])
def test_cluster(sim, cfg):
    sim.config(**cfg)
    d = sim.empty(8 * 32 * 4)
    assert sim.lib("instr").cluster(d) == 0, sim.report()
    r = np.arange(8) % 4
    assert np.array_equal(sim.host(d, (8, 32), np.uint32), ((r[:, None] + 1) % 4) * 100 + np.arange(32))


def test_printf(sim, capfd):
    assert sim.lib("instr").print(7) == 0, sim.report()
    assert "hello 7 world 1.50" in capfd.readouterr().out
