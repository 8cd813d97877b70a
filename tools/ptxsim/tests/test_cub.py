"""CUB device-wide algorithms: broad coverage of compiler output, CTAs that wait for each other."""

import numpy as np
import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.needs("cub_algos")]


@pytest.mark.parametrize("cfg", [{}, {"sched": 3}, {"check": 1}], ids=["default", "sched", "check"])
@pytest.mark.parametrize("n", [1000, 100000])
def test_cub(sim, cfg, n):
    sim.config(**cfg)
    lib = sim.lib("cub_algos")
    rng = np.random.default_rng(n)
    a = rng.integers(0, 100, n).astype(np.float32)
    o = sim.empty(4)
    assert lib.reduce_f32(sim.dev(a), o, n) == 0, sim.report()
    assert sim.host(o, 1, np.float32)[0] == a.sum()
    u = rng.integers(0, 2**32, n, dtype=np.uint32)
    o = sim.empty(4 * n)
    assert lib.scan_u32(sim.dev(u), o, n) == 0, sim.report()
    assert np.array_equal(sim.host(o, n, np.uint32), np.cumsum(u, dtype=np.uint32))
    ko, vo = sim.empty(4 * n), sim.empty(4 * n)
    assert lib.sort_pairs(sim.dev(u), ko, sim.dev(np.arange(n, dtype=np.uint32)), vo, n) == 0, sim.report()
    assert np.array_equal(sim.host(vo, n, np.uint32), np.argsort(u, kind="stable"))
    s = rng.integers(-(2**31), 2**31, n).astype(np.int32)
    v, i = sim.empty(4), sim.empty(4)
    assert lib.argmin_s32(sim.dev(s), v, i, n) == 0, sim.report()
    assert sim.host(v, 1, np.int32)[0] == s.min()
    assert sim.host(i, 1, np.int32)[0] == s.argmin()
