"""Counters against kernels of known composition, so that tests may assert budgets with them."""

import ctypes
import json
import os
import subprocess
import sys

import harness
import numpy as np
import pytest
from test_instr import TMA, rng

pytestmark = pytest.mark.needs("counters", "instr")

KNOWN = {  # per warp in region 1 of k_classes
    "cvt.frnd": 3,
    "cvt.f2i": 2,
    "cvt.i2f": 5,
    "cvt.f2f": 3,
    "cvt.i2i": 1,
    "float": 5,
    "half": 2,
    "sfu": 1,
    "int": 6,
    "mov": 1,
    "ld.global": 1,
    "st.global": 1,
    "st.shared": 2,
    "ld.shared": 1,
    "ldmatrix": 1,
    "stmatrix": 1,
    "movmatrix": 1,
    "shuffle": 2,
    "vote": 1,
    "redux": 1,
    "mma": 1,
    "barrier": 1,
    "fence": 2,
    "control": 1,
}
GROUPS = {
    "conversion": 14,
    "float": 8,
    "integer": 6,
    "move": 1,
    "global": 2,
    "shared": 5,
    "shuffle": 5,
    "tensor": 1,
    "barrier": 3,
    "branch": 1,
}


@pytest.fixture
def counted(sim):
    sim.config(summary=1)
    sim.rt.ptxsim_summary_reset()
    yield sim
    sim.rt.ptxsim_summary_reset()


def kernel(sim, name):
    """The counters of the only kernel whose name holds |name|."""
    (k,) = [v for n, v in sim.summary()["kernels"].items() if name in n]
    return k


@pytest.mark.parametrize(
    "cfg", [{}, {"sched": 3}, {"check": 1}, {"async": "lazy"}], ids=["default", "sched", "check", "lazy"]
)
def test_classes(counted, cfg):
    counted.config(summary=1, **cfg)
    a = counted.dev(rng.standard_normal(64).astype(np.float32))
    for blocks in (1, 3):
        assert counted.lib("counters").classes(blocks, a, counted.empty(blocks * 256)) == 0, counted.report()
    k = kernel(counted, "k_classes")
    warps = 8  # two per block, of 1 and 3 blocks
    one, two = k["regions"]["1"], k["regions"]["2"]
    assert k["launches"] == 2
    assert one["classes"] == {c: n * warps for c, n in KNOWN.items()}
    assert one["groups"] == {g: n * warps for g, n in GROUPS.items()}
    assert one["warp_instructions"] == warps * sum(KNOWN.values())
    # instructions whose guard is off are issued as well
    assert two["classes"] == {"int": 2 * warps, "st.global": warps}
    assert all(k["classes"][c] >= n * warps for c, n in KNOWN.items())
    assert k["warp_instructions"] == sum(k["classes"].values()) == sum(k["groups"].values())


def test_counts_do_not_depend_on_waiting(counted):
    seen = []
    for cfg in ({}, {"sched": 1}, {"sched": 2}, {"sched": 3, "async": "random:1"}, {"check": 1}):
        counted.config(summary=1, **cfg)
        counted.rt.ptxsim_summary_reset()
        assert counted.lib("counters").waits(counted.empty(1024)) == 0, counted.report()
        k = kernel(counted, "k_waits")
        seen.append((k["classes"], k["thread_instructions"]))
    assert all(s == seen[0] for s in seen)
    assert seen[0][0]["mbarrier"] == 8 * 2 + 1  # arrive and wait of eight warps, one initialisation ...
    assert seen[0][0]["barrier"] == 8 * 4  # ... bar.sync, bar.red, cluster arrive and wait


@pytest.mark.parametrize("twice", [0, 1])
def test_l2_traffic(counted, twice):
    n = 3
    o = counted.empty(2 * n * 128)
    a = rng.integers(0, 2**16, (96, 4)).astype(np.uint32)
    assert counted.lib("counters").traffic(counted.dev(a), o, n, twice) == 0, counted.report()
    e = a[:32, 0] + a[:32, 1] + a[:32, 2] + a[64:, 3]
    assert np.array_equal(counted.host(o, (2 * n, 32), np.uint32), np.tile(e, (2 * n, 1)))
    t = kernel(counted, "k_traffic")["l2_to_sm"]
    ctas = 2 * n
    assert t["load_bytes"] == (1 + twice) * 512 * ctas
    assert t["load_unique_bytes"] == 512 * ctas
    assert t["cp_async_bytes"] == 512 * ctas
    assert t["tma_bytes"] == 1024 * n
    assert t["tma_delivered_bytes"] == 1024 * ctas
    load = (1 + twice) * 512 + 512
    assert t["per_cta"] == {
        "load": {"min": load, "mean": load, "max": load},
        "tma": {"min": 0, "mean": 512, "max": 1024},
        "arrived": {"min": load + 1024, "mean": load + 1024, "max": load + 1024},
    }


@pytest.mark.parametrize("case", TMA, ids=[f"{c[0]}d-sw{c[3]}-{i}" for i, c in enumerate(TMA)])
def test_tiles_that_hang_over_an_edge(counted, case):
    """Only what lies inside the tensor is read from L2; tma_load_bytes counts whole boxes."""
    dims, dtype, es, sw, shape, box, co = case
    src = counted.dev(np.zeros(shape[::-1], {1: np.uint8, 2: np.uint16, 4: np.uint32}[es]))

    def arr(t, v):
        return (t * 5)(*v)

    assert (
        counted.lib("instr").tma(
            dims,
            dtype,
            es,
            sw,
            src,
            src,
            arr(ctypes.c_uint64, shape),
            arr(ctypes.c_uint32, box),
            arr(ctypes.c_int, co),
            counted.empty(int(np.prod(box)) * es),
        )
        == 0
    ), counted.report()
    k = kernel(counted, "k_tma")
    inside = es * int(np.prod([max(0, min(c + b, n) - max(c, 0)) for n, b, c in zip(shape, box, co)]))
    assert k["l2_to_sm"]["tma_bytes"] == inside
    assert k["tma_load_bytes"] == es * np.prod(box)


def test_nodes_of_a_layer(counted):
    lib = counted.lib("counters")
    x, y = counted.empty(128), counted.empty(256)
    counted.rt.ptxsim_summary_reset()
    assert lib.layer(x, y, 0) == 0, counted.report()
    s = counted.summary()
    assert s["counts"] == {"kernel": 2, "event_record": 1, "stream_synchronize": 1}  # two launches, no memset
    q, g = s["nodes"][:2]
    assert q["node"] == g["node"] == "kernel"
    assert "k_quantise" in q["kernel"]
    assert q["attributes"] == {}
    assert q["stream"] == g["stream"] > 0
    assert g["attributes"] == {"programmatic_stream_serialization": True, "cluster_dimension": [2, 1, 1]}
    assert g["cluster"] == [2, 1, 1]
    assert g["grid"] == [2, 1, 1]
    assert sorted(k["classes"]["griddepcontrol"] for k in s["kernels"].values()) == [
        1,
        2,
    ]  # one warp of k_quantise, two of k_gemm
    counted.rt.ptxsim_summary_reset()
    assert lib.layer(x, y, 1) == 0
    s = counted.summary()
    assert s["counts"]["memset"] == 2
    assert s["counts"]["memcpy"] == 1
    assert s["counts"]["kernel"] == 2
    assert [(n["node"], n["bytes"]) for n in s["nodes"][:3]] == [("memset", 256), ("memcpy", 64), ("memset", 64)]
    assert s["nodes"][1]["kind"] == "device_to_device"


def test_budget(counted):
    """What such a test looks like: warp instructions per 32 outputs, by region and class."""
    acc = rng.integers(-1000, 1000, (64, 4)).astype(np.int32)
    o = counted.empty(512)
    assert counted.lib("counters").epilogue(counted.dev(acc), counted.dev(np.array([0.5], np.float32)), o) == 0, (
        counted.report()
    )
    k = kernel(counted, "k_epilogue")["regions"]["1"]

    def per(n):
        return n / (64 * 4 / 32)

    assert per(k["warp_instructions"]) <= 3.5
    assert per(k["classes"]["cvt.i2f"]) == 1
    assert per(k["classes"]["cvt.f2f"]) == 0.5
    assert "cvt.f2i" not in k["classes"]


def test_a_new_file_starts_a_new_list(sim, tmp_path):
    lib, o = sim.lib("counters"), sim.empty(1024)
    for name, n in (("a", 2), ("b", 1)):
        sim.config(stats=tmp_path / name)
        for _ in range(n):
            assert lib.waits(o) == 0
    sim.config()
    assert lib.waits(o) == 0
    sim.config(stats=tmp_path / "b")
    assert lib.waits(o) == 0
    a, b = (json.loads((tmp_path / n).read_text()) for n in "ab")
    assert len(a) == 2
    assert len(b) == 2
    assert a[0]["classes"] == b[1]["classes"]
    assert b[0]["stream"] == 0
    assert b[0]["attributes"] == {}


def test_summary_file(tmp_path):
    """PTXSIM_SUMMARY of a process, written when it ends."""
    code = (
        "import harness; s = harness.Sim(); lib = s.lib('counters'); assert lib.waits(s.empty(1024)) == 0; "
        "assert lib.layer(s.empty(128), s.empty(256), 1) == 0"
    )
    env = dict(os.environ, PTXSIM_SUMMARY=str(tmp_path / "s.json"))
    r = subprocess.run([sys.executable, "-c", code], cwd=harness.HERE, env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    s = json.loads((tmp_path / "s.json").read_text())
    assert s["counts"]["kernel"] == 3
    assert s["counts"]["memset"] == 2
    assert len(s["kernels"]) == 3
