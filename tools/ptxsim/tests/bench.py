"""Measures simulation speed. Run: python3 tests/bench.py"""

import ctypes
import time

import harness
import numpy as np

f32 = ctypes.c_float
sim = harness.Sim()
rng = np.random.default_rng(0)


def run(lib, fn, M, N, K, it, ot, sc, extra=(), style=90, **cfg):
    sim.reset()
    sim.config(**cfg)
    A, B = rng.integers(-3, 4, (M, K)).astype(it), rng.integers(-3, 4, (N, K)).astype(it)
    a, b, d = sim.dev(A), sim.dev(B), sim.dev(np.zeros((M, N), ot))
    f = getattr(sim.lib(lib), fn)
    best = 1e9
    for _ in range(3):
        t = time.perf_counter()
        rc = (
            f(M, N, K, 1, a, b, d, d, sc(1), sc(0), *extra)
            if style == 90
            else f(M, N, K, a, b, d, *((d,) if "s8" in fn else ()), sc(1), sc(0), *extra)
        )
        best = min(best, time.perf_counter() - t)
        assert rc == 0, sim.report()
    print(f"{fn:28s} {M}x{N}x{K:5d} {cfg or ''!s:26s} {best * 1e3:9.1f} ms  {M * N * K / best / 1e9:6.2f} GMAC/s")


for cfg in ({}, {"check": 1}):
    for M, N, K in ((128, 128, 512), (512, 512, 1024)):
        run("sm80_s8", "sm80_s8_128x128", M, N, K, np.int8, np.int32, ctypes.c_int, style=80, **cfg)
        run("sm80_f16", "sm80_f16_tn", M, N, K, np.float16, np.float16, f32, (1,), style=80, **cfg)
        run("sm90_f16", "sm90_f16_pingpong_1x1", M, N, K, np.float16, np.float16, f32, **cfg)
        run("sm90_f16", "sm90_f16_coop_2x1", M, N, K, np.float16, np.float16, f32, **cfg)
        run("sm90_misc", "sm90_s8_coop_2x1", M, N, K, np.int8, np.int32, ctypes.c_int, **cfg)
        run("sm90_misc", "sm90_e4m3_coop_1x1", M, N, K, np.uint8, np.float16, f32, **cfg)
