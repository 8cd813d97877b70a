"""Defective kernels must be reported, and their corrected twins must not be."""

import numpy as np
import pytest

pytestmark = pytest.mark.needs("negative")

CASES = {  # kernel: (configuration under which it is reported, words expected in the report)
    "missing_sync": ({"check": "race"}, "race"),
    "missing_sync_war": ({"check": 1}, "race"),
    "missing_cp_wait": ({"check": "race"}, "race"),
    "oob_global": ({"check": 1}, "out of bounds"),
    "oob_read": ({"check": 1}, "out of bounds"),
    "oob_far": ({}, "illegal memory access"),
    "oob_shared": ({}, "shared memory access out of bounds"),
    "null_ptr": ({}, "null pointer"),
    "misaligned": ({}, "misaligned"),
    "uninit_shared": ({"check": 1}, "never written"),
    "uninit_global": ({"check": 1}, "never written"),
    "deadlock_bar": ({}, "deadlock"),
    "deadlock_mbar": ({}, "deadlock"),
    "deadlock_bytes": ({}, "deadlock"),
    "deadlock_global": ({}, "deadlock"),
    "over_arrive": ({}, "pending"),
    "no_mbar_init": ({}, "not an initialised mbarrier"),
    "missing_mbar_wait": ({"check": "race"}, "race"),
    "early_reuse": ({"check": 1}, "race"),
    "missing_proxy_fence": ({"check": 1}, "fence.proxy.async"),
    "missing_store_wait": ({"check": 1}, ""),
    "wgmma_no_fence": ({"check": 1}, "wgmma.fence"),
    "wgmma_early_read": ({"check": 1}, "still in flight"),
    "wgmma_early_overwrite": ({"check": 1}, "race"),
    "wgmma_no_wait": ({"check": 1}, "in flight"),
    "assert_fail": ({}, "assertion"),
    "trap": ({}, "trap"),
    "diverged_shfl": ({}, "deadlock"),
    "unsupported": ({}, "sparse mma"),
    "register_pool": ({}, "waits for registers"),
    "register_take": ({}, "setmaxnreg.inc to 40 registers of a thread that has 80"),
    "launch_bounds": ({}, "__launch_bounds__"),
    "dynamic_limit": ({}, "dynamic shared memory"),
}


def run(sim, fn, ok):
    lib = sim.lib("negative")
    a, o = sim.dev(np.arange(256, dtype=np.uint32)), sim.empty(512)
    if fn == "deadlock_global":
        o = sim.dev(np.zeros(128, np.uint32))
    if fn.startswith("oob_read"):
        a = sim.dev(np.arange(128, dtype=np.uint32))
    return getattr(lib, fn)(a, o, 128, ok), o


@pytest.mark.parametrize("fn", list(CASES))
def test_reported(sim, fn):
    cfg, words = CASES[fn]
    sim.config(**cfg)
    rc, _ = run(sim, fn, 0)
    rep = sim.report()
    print(rep)
    assert rc != 0, rep
    assert words in rep, rep
    if fn not in ("unsupported", "launch_bounds", "dynamic_limit"):
        assert "PTX line" in rep, rep
        assert "negative.cu:" in rep, rep  # -lineinfo gives the CUDA source line


@pytest.mark.parametrize(
    "cfg",
    [{"check": 1}, {"async": "lazy", "check": 1}, {"async": "random:2", "sched": 5}],
    ids=["check", "check-lazy", "random"],
)
@pytest.mark.parametrize("fn", [c for c in CASES if c != "unsupported"])
def test_corrected(sim, fn, cfg):
    sim.config(**cfg)
    rc, _ = run(sim, fn, 1)
    assert rc == 0, sim.report()


@pytest.mark.parametrize("fn", ["missing_cp_wait", "missing_mbar_wait", "missing_store_wait", "wgmma_early_overwrite"])
def test_lazy_changes_the_answer(sim, fn):
    """Without PTXSIM_CHECK, a missing wait shows up as a wrong result in lazy mode."""
    out = []
    for mode, ok in (("eager", 1), ("lazy", 1), ("lazy", 0)):
        sim.config(**{"async": mode})
        rc, o = run(sim, fn, ok)
        assert rc == 0, sim.report()
        out.append(sim.host(o, 128, np.uint32))
    assert np.array_equal(out[0], out[1])
    assert not np.array_equal(out[0], out[2])


def test_ranked_warps_get_far_ahead(sim):
    """Where only a warp far ahead of another goes wrong, a few orders of ranks find it, and random slices do not."""

    def wrong(schedule, ok):
        count = 0
        for seed in range(20):
            sim.config(**{"async": "lazy"}, sched=schedule.format(seed))
            rc, o = run(sim, "missed_phase", ok)
            if rc != 0:
                sim.reset()
                count += 1
            else:
                want = np.arange(256, dtype=np.uint32).reshape(8, 32)[:, :16].ravel()
                count += not np.array_equal(sim.host(o, 128, np.uint32), want)
        return count

    assert wrong("ranked:{}", 1) == 0
    assert wrong("ranked:{}", 0) >= 2
    assert wrong("{}", 1) == 0
