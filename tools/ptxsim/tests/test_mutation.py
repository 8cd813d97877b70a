"""Defects injected into CUTLASS kernels: synchronisation instructions are blanked out or weakened in the
embedded PTX. Each must be found by PTXSIM_CHECK=1; the lazy mode must give a wrong answer where the table says so."""

import ctypes
import re

import harness
import numpy as np
import pytest

f32 = ctypes.c_float
CASES = [  # library, function, pattern, replacement (None: blank), detected by PTXSIM_CHECK, wrong answer in lazy mode
    ("sm80_s8", "sm80_s8_128x128", rb"cp\.async\.wait_group 1;", b"cp.async.wait_group 3;", True, True),
    ("sm80_s8", "sm80_s8_128x128", rb"cp\.async\.wait_group 1;", None, True, True),
    ("sm80_s8", "sm80_s8_128x128", rb"bar\.sync[ \t]+0;", None, True, False),
    (
        "sm90_f16",
        "sm90_f16_pingpong_1x1",
        rb"wgmma\.wait_group\.sync\.aligned 0;",
        b"wgmma.wait_group.sync.aligned 9;",
        True,
        True,
    ),
    (
        "sm90_f16",
        "sm90_f16_coop_2x1",
        rb"wgmma\.wait_group\.sync\.aligned 0;",
        b"wgmma.wait_group.sync.aligned 9;",
        True,
        True,
    ),
    ("sm90_f16", "sm90_f16_pingpong_1x1", rb"fence\.proxy\.async\.shared::cta;", None, True, False),
    ("sm90_f16", "sm90_f16_coop_2x1", rb"fence\.proxy\.async\.shared::cta;", None, True, False),
    (
        "sm90_f16",
        "sm90_f16_coop_2x1",
        rb"cp\.async\.bulk\.wait_group\.read \d;",
        b"cp.async.bulk.wait_group.read 9;",
        True,
        False,
    ),
]


def mutated(lib, pattern, repl, tag):
    src = (harness.BUILD / f"{lib}.so").read_bytes()
    n = 0

    def sub(m):
        nonlocal n
        n += 1
        r = (repl or b";").ljust(len(m.group(0)))
        assert len(r) == len(m.group(0))
        return r

    out = re.sub(pattern, sub, src)
    assert n, "pattern not found"
    p = harness.BUILD / f"mutant_{tag}.so"
    p.write_bytes(out)
    return p


def gemm(sim, lib, fn):
    rng = np.random.default_rng(5)
    M, N, K = 256, 256, 640
    if lib == "sm80_s8":
        A, B = rng.integers(-128, 128, (M, K)), rng.integers(-128, 128, (N, K))
        d = sim.dev(np.zeros((M, N), np.int32))
        rc = getattr(sim.mut, fn)(M, N, K, sim.dev(A.astype(np.int8)), sim.dev(B.astype(np.int8)), d, d, 1, 0)
        return rc, rc == 0 and np.array_equal(sim.host(d, (M, N), np.int32), A @ B.T)
    A, B = rng.integers(-3, 4, (M, K)), rng.integers(-3, 4, (N, K))
    d = sim.dev(np.zeros((M, N), np.float16))
    rc = getattr(sim.mut, fn)(
        M, N, K, 1, sim.dev(A.astype(np.float16)), sim.dev(B.astype(np.float16)), d, d, f32(1), f32(0)
    )
    return rc, rc == 0 and np.array_equal(sim.host(d, (M, N), np.float16), (A @ B.T).astype(np.float16))


def case(i):
    library, function = CASES[i][:2]
    marks = [pytest.mark.needs(library), *([pytest.mark.nightly] if library == "sm90_f16" else [])]
    return pytest.param(i, id=f"{function}-{i}", marks=marks)


@pytest.mark.parametrize("case", [case(i) for i in range(len(CASES))])
def test_mutant(sim, case):
    lib, fn, pat, repl, found, wrong = CASES[case]
    p = mutated(lib, pat, repl, case)
    try:
        sim.mut = ctypes.CDLL(str(p))
        sim.config(check=1)
        rc, _ = gemm(sim, lib, fn)
        rep = sim.report()
        print(rep)
        assert not found or rc != 0
        sim.reset()
        sim.config(**{"async": "lazy"}, sched=1)
        rc, ok = gemm(sim, lib, fn)
        assert not wrong or not ok
    finally:
        p.unlink()
