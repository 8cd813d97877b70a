"""Unmodified CUTLASS kernels against host references, bit for bit.

Floating-point operands are small integers, so every order of summation gives the same result.
"""

import ctypes

import numpy as np
import pytest

f32 = ctypes.c_float
MODES = {
    "eager": {},
    "lazy": dict(**{"async": "lazy"}, sched=11),
    "random": dict(**{"async": "random:5"}, sched=3),
    "check": {"check": 1},
    "check-lazy": dict(**{"async": "lazy"}, check=1, sched=2),
}


@pytest.fixture(params=list(MODES), ids=list(MODES))
def msim(request, sim):
    sim.config(**MODES[request.param])
    return sim


def check(sim, rc, got, ref):
    assert rc == 0, f"rc {rc}\n{sim.report()}"
    bad = np.argwhere(got != ref)
    assert len(bad) == 0, (
        f"{len(bad)} of {ref.size} wrong, first at {bad[0]}: {got[tuple(bad[0])]} != {ref[tuple(bad[0])]}"
    )


def bf16_bits(x):
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bf16_val(u):
    return (u.astype(np.uint32) << 16).view(np.float32)


def e4m3_bits(x):  # exact for integers of magnitude up to 16
    out = np.zeros(x.shape, np.uint8)
    for v in np.unique(x):
        b = 0
        if v:
            e = int(np.floor(np.log2(abs(v))))
            b = (e + 7) << 3 | int((abs(v) / 2.0**e - 1) * 8)
        out[x == v] = b | (0x80 if v < 0 else 0)
    return out


def pack4(x):
    return ((x[..., 0::2] & 15) | ((x[..., 1::2] & 15) << 4)).astype(np.uint8)


def ints(*s, lo=-4, hi=5, seed=0):
    return np.random.default_rng(seed + sum(s)).integers(lo, hi, s)


SHAPES = [(128, 128, 64), (128, 128, 512), (200, 136, 96), (17, 64, 272)]


@pytest.mark.needs("sm80_s8")
@pytest.mark.parametrize("shape", SHAPES + [(100, 72, 80), (256, 384, 1024)], ids=str)
@pytest.mark.parametrize("fn", ["sm80_s8_128x128", "sm80_s8_64x64"])
def test_sm80_s8(msim, fn, shape):
    M, N, K = shape
    A, B, S = ints(M, K, lo=-128, hi=128), ints(N, K, lo=-128, hi=128, seed=1), ints(M, N, lo=-1000, hi=1000)
    a, b, s, d = (
        msim.dev(A.astype(np.int8)),
        msim.dev(B.astype(np.int8)),
        msim.dev(S.astype(np.int32)),
        msim.empty(M * N * 4),
    )
    rc = getattr(msim.lib("sm80_s8"), fn)(M, N, K, a, b, d, s, 2, -3)
    check(msim, rc, msim.host(d, (M, N), np.int32) if rc == 0 else None, (2 * (A @ B.T) - 3 * S).astype(np.int32))


@pytest.mark.nightly
@pytest.mark.needs("sm80_s4")
@pytest.mark.parametrize("shape", [(128, 128, 128), (100, 64, 96), (130, 200, 544)], ids=str)
def test_sm80_s4(msim, shape):
    M, N, K = shape
    A, B = ints(M, K, lo=-8, hi=8), ints(N, K, lo=-8, hi=8, seed=1)
    a, b, d = msim.dev(pack4(A)), msim.dev(pack4(B)), msim.empty(M * N * 4)
    rc = msim.lib("sm80_s4").sm80_s4_128x128(M, N, K, a, b, d, 1, 0)
    check(msim, rc, msim.host(d, (M, N), np.int32) if rc == 0 else None, (A @ B.T).astype(np.int32))


@pytest.mark.nightly
@pytest.mark.needs("sm80_f16")
@pytest.mark.parametrize("shape", [(128, 128, 64), (200, 136, 96), (384, 256, 512)], ids=str)
@pytest.mark.parametrize(
    ("fn", "extra"),
    [
        ("sm80_f16_tn", (1,)),
        ("sm80_f16_tn", (3,)),
        ("sm80_f16_nt", ()),
        ("sm80_f16_streamk", (-1,)),
        ("sm80_f16_streamk", (5,)),
        ("sm80_f16_splitk_parallel", (2,)),
        ("sm80_bf16_tn", ()),
        ("sm80_tf32_tn", ()),
    ],
)
def test_sm80_float(msim, fn, extra, shape):
    M, N, K = shape
    A, B, C = ints(M, K), ints(N, K, seed=1), ints(M, N, seed=2)
    fin = {"sm80_bf16_tn": bf16_bits, "sm80_tf32_tn": lambda x: x.astype(np.float32)}.get(
        fn, lambda x: x.astype(np.float16)
    )
    out = np.float32 if fn in ("sm80_bf16_tn", "sm80_tf32_tn") else np.float16
    t = (lambda x: np.ascontiguousarray(x.T)) if fn.endswith("_nt") else (lambda x: x)
    a, b, d = msim.dev(fin(t(A))), msim.dev(fin(t(B))), msim.dev(C.astype(out))
    rc = getattr(msim.lib("sm80_f16"), fn)(M, N, K, a, b, d, f32(1), f32(0.5), *extra)
    check(msim, rc, msim.host(d, (M, N), out) if rc == 0 else None, (A @ B.T + 0.5 * C).astype(out))


SM90 = [
    ("sm90_f16", "sm90_f16_pingpong_1x1", "f16", "f16", ()),
    ("sm90_f16", "sm90_f16_coop_2x1", "f16", "f16", ()),
    ("sm90_f16", "sm90_f16_coop_1x2_nt", "f16", "f16", ()),
    ("sm90_f16", "sm90_f16_coop_streamk", "f16", "f16", (1,)),
    ("sm90_f16", "sm90_f16_coop_streamk", "f16", "f16", (3,)),
    ("sm90_f16", "sm90_f16_nosmem", "f16", "f16", ()),
    ("sm90_misc", "sm90_bf16_pingpong_1x2", "bf16", "bf16", ()),
    ("sm90_misc", "sm90_e4m3_coop_1x1", "e4m3", "f16", ()),
    ("sm90_misc", "sm90_s8_coop_2x1", "s8", "s32", ()),
    ("sm90_misc", "sm90_s8_pingpong_1x1", "s8", "s32", ()),
]


@pytest.mark.nightly
@pytest.mark.needs("sm90_f16", "sm90_misc")
@pytest.mark.parametrize(
    "shape", [(64, 128, 64, 1), (128, 128, 512, 1), (200, 144, 96, 2), (304, 256, 640, 1)], ids=str
)
@pytest.mark.parametrize(("lib", "fn", "it", "ot", "extra"), SM90, ids=[f"{x[1]}{x[4] or ''}" for x in SM90])
def test_sm90(msim, lib, fn, it, ot, extra, shape):
    M, N, K, L = shape
    big = it == "s8"
    A, B, C = (
        ints(L, M, K, lo=-128 if big else -3, hi=128 if big else 4),
        ints(L, N, K, lo=-128 if big else -3, hi=128 if big else 4, seed=1),
        ints(L, M, N, seed=2),
    )
    enc = {
        "f16": lambda x: x.astype(np.float16),
        "bf16": bf16_bits,
        "e4m3": e4m3_bits,
        "s8": lambda x: x.astype(np.int8),
        "s32": lambda x: x.astype(np.int32),
    }
    a, b = (np.ascontiguousarray(x.transpose(0, 2, 1)) if fn.endswith("_nt") else x for x in (A, B))
    dA, dB, dC = msim.dev(enc[it](a)), msim.dev(enc[it](b)), msim.dev(enc[ot](C))
    odt = {"f16": np.float16, "bf16": np.uint16, "s32": np.int32}[ot]
    d = msim.empty(L * M * N * np.dtype(odt).itemsize)
    sc = ctypes.c_int if ot == "s32" else f32
    rc = getattr(msim.lib(lib), fn)(M, N, K, L, dA, dB, dC, d, sc(1), sc(2), *extra)
    ref = A @ B.transpose(0, 2, 1) + 2 * C
    got = msim.host(d, (L, M, N), odt) if rc == 0 else None
    if ot == "bf16":
        if rc == 0:
            got = bf16_val(got)
        u = ref.astype(np.float32).view(np.uint32)
        ref = (((u + 0x7FFF + ((u >> 16) & 1)) >> 16) << 16).view(np.float32)
    else:
        ref = ref.astype(odt)
    check(msim, rc, got, ref)


@pytest.mark.nightly
@pytest.mark.needs("sm90_s8_evt")
@pytest.mark.parametrize("shape", [(128, 128, 128), (200, 144, 256), (300, 256, 640)], ids=str)
@pytest.mark.parametrize("fn", ["sm90_s8_evt_coop_2x1", "sm90_s8_evt_pingpong_1x2_residual"])
def test_sm90_s8_evt(msim, fn, shape):
    M, N, K = shape
    rng = np.random.default_rng(4)
    A, B = ints(M, K, lo=-128, hi=128), ints(N, K, lo=-128, hi=128, seed=1)
    C = rng.standard_normal((M, N)).astype(np.float16)
    sm, sn, bias = (rng.uniform(0.001, 0.01, n).astype(np.float32) for n in (M, N, N))
    d = msim.empty(M * N * 2)
    rc = getattr(msim.lib("sm90_s8_evt"), fn)(
        M,
        N,
        K,
        msim.dev(A.astype(np.int8)),
        msim.dev(B.astype(np.int8)),
        msim.dev(C),
        d,
        msim.dev(sm),
        msim.dev(sn),
        msim.dev(bias),
    )
    acc = (A @ B.T).astype(np.float32)
    t = sn[None, :] * acc
    r = (sm[:, None].astype(np.float64) * t + bias[None, :]).astype(np.float32)  # one fused multiply-add
    if "residual" in fn:
        r = C.astype(np.float32) + r
    check(msim, rc, msim.host(d, (M, N), np.float16) if rc == 0 else None, r.astype(np.float16))


@pytest.mark.nightly
@pytest.mark.needs("sm90_mixed")
@pytest.mark.parametrize("shape", [(128, 128, 128, 128), (72, 256, 256, 64), (200, 384, 512, 128)], ids=str)
@pytest.mark.parametrize("fn", ["sm90_mixed_coop", "sm90_mixed_pingpong_2x1"])
def test_sm90_mixed(msim, fn, shape):
    M, N, K, G = shape
    A, B = ints(M, K), ints(N, K, lo=-8, hi=8, seed=1)
    S = np.random.default_rng(3).choice([0.25, 0.5, 1.0, 2.0], (K // G, N))
    d = msim.empty(M * N * 2)
    rc = getattr(msim.lib("sm90_mixed"), fn)(
        M, N, K, G, msim.dev(A.astype(np.float16)), msim.dev(pack4(B)), msim.dev(S.astype(np.float16)), d
    )
    W = B * np.repeat(S, G, axis=0).T
    check(msim, rc, msim.host(d, (M, N), np.float16) if rc == 0 else None, (A @ W.T).astype(np.float16))


@pytest.mark.nightly
@pytest.mark.needs("sm80_evt")
@pytest.mark.parametrize("shape", [(128, 128, 128), (200, 144, 256), (100, 72, 80)], ids=str)
def test_sm80_s8_evt(msim, shape):
    M, N, K = shape
    rng = np.random.default_rng(4)
    A, B = ints(M, K, lo=-128, hi=128), ints(N, K, lo=-128, hi=128, seed=1)
    sm, sn, bias = (rng.uniform(0.001, 0.01, n).astype(np.float32) for n in (M, N, N))
    d = msim.empty(M * N * 2)
    rc = msim.lib("sm80_evt").sm80_s8_evt(
        M, N, K, msim.dev(A.astype(np.int8)), msim.dev(B.astype(np.int8)), d, msim.dev(sm), msim.dev(sn), msim.dev(bias)
    )
    acc = (A @ B.T).astype(np.float32)
    # the compiler contracts the last product and the bias into one fused multiply-add
    r = (sm[:, None].astype(np.float64) * (acc * sn[None, :]) + bias[None, :]).astype(np.float32)
    check(msim, rc, msim.host(d, (M, N), np.float16) if rc == 0 else None, r.astype(np.float16))


@pytest.mark.nightly
@pytest.mark.needs("sm80_evt")
@pytest.mark.parametrize("shape", [(128, 128, 128), (200, 144, 256), (100, 72, 80)], ids=str)
def test_sm80_mixed(msim, shape):
    M, N, K = shape
    A, B = ints(M, K), ints(N, K, lo=-128, hi=128, seed=1)
    d = msim.empty(M * N * 4)
    rc = msim.lib("sm80_evt").sm80_f16_s8_mixed(M, N, K, msim.dev(A.astype(np.float16)), msim.dev(B.astype(np.int8)), d)
    check(msim, rc, msim.host(d, (M, N), np.float32) if rc == 0 else None, (A @ B.T).astype(np.float32))


@pytest.mark.nightly
@pytest.mark.needs("sm80_f16", "sm90_f16")
@pytest.mark.parametrize(
    ("lib", "fn", "style"),
    [("sm80_f16", "sm80_f16_tn", 80), ("sm90_f16", "sm90_f16_coop_2x1", 90), ("sm90_f16", "sm90_f16_coop_1x2_nt", 90)],
)
def test_random_values(sim, lib, fn, style):
    """Arbitrary values: agreement within rounding of the half-precision result."""
    M, N, K = 128, 256, 320
    rng = np.random.default_rng(8)
    A, B = rng.standard_normal((M, K)).astype(np.float16), rng.standard_normal((N, K)).astype(np.float16)
    a, b = (np.ascontiguousarray(x.T) for x in (A, B)) if fn.endswith("_nt") else (A, B)
    d = sim.dev(np.zeros((M, N), np.float16))
    da, db = sim.dev(a), sim.dev(b)
    f = getattr(sim.lib(lib), fn)
    rc = f(M, N, K, da, db, d, f32(1), f32(0), 1) if style == 80 else f(M, N, K, 1, da, db, d, d, f32(1), f32(0))
    assert rc == 0, sim.report()
    ref = A.astype(np.float64) @ B.astype(np.float64).T
    assert np.all(np.abs(sim.host(d, (M, N), np.float16) - ref) <= 2.0**-10 * np.abs(ref) + 1e-4)


@pytest.mark.nightly
@pytest.mark.needs("sm90_grouped")
def test_sm90_grouped(msim):
    shapes = [(128, 128, 64), (200, 144, 96), (72, 256, 320), (300, 64, 128)]
    A, B, C = (
        [ints(m, k) for m, n, k in shapes],
        [ints(n, k, seed=1) for m, n, k in shapes],
        [ints(m, n, seed=2) for m, n, k in shapes],
    )
    lib = msim.lib("sm90_grouped")

    def arr(xs):
        return (ctypes.c_void_p * len(shapes))(*[msim.dev(x.astype(np.float16)).value for x in xs])

    outs = [msim.empty(m * n * 2) for m, n, k in shapes]
    rc = lib.sm90_grouped(
        len(shapes),
        (ctypes.c_int * 12)(*[v for s in shapes for v in s]),
        arr(A),
        arr(B),
        arr(C),
        (ctypes.c_void_p * len(shapes))(*[o.value for o in outs]),
        f32(1),
        f32(0.5),
    )
    assert rc == 0, f"rc {rc}\n{msim.report()}"
    for (m, n, _k), a, b, c, o in zip(shapes, A, B, C, outs):
        check(msim, rc, msim.host(o, (m, n), np.float16), (a @ b.T + 0.5 * c).astype(np.float16))
