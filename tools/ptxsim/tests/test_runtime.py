"""The runtime library as a drop-in replacement, device selection, statistics."""

import ctypes
import json
import os
import subprocess

import harness
import numpy as np
import pytest


@pytest.fixture
def program(tmp_path):
    """An ordinary CUDA program."""
    exe = tmp_path / "main"
    target = ["-gencode", "arch=compute_80,code=compute_80", "-no-compress", "-cudart", "shared"]
    source = harness.HERE / "kernels" / "main.cu"
    subprocess.run([harness.NVCC, "-std=c++17", *target, str(source), "-o", str(exe)], check=True)
    return exe


@pytest.mark.parametrize(("device", "expect"), [("h200", "sms 132 cc 9.0"), ("a100", "sms 108 cc 8.0")])
def test_program(program, device, expect, tmp_path):
    env = dict(
        os.environ,
        LD_LIBRARY_PATH=str(harness.LIBRARY.parent),
        PTXSIM_DEVICE=device,
        PTXSIM_CHECK="1",
        PTXSIM_STATS=str(tmp_path / "s.json"),
    )
    r = subprocess.run([str(program)], env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    assert "ok counter 1000 " + expect in r.stdout, r.stdout + r.stderr
    st = json.loads((tmp_path / "s.json").read_text())[0]
    assert st["grid"] == [8, 1, 1]
    assert st["atomics"] == 1000
    # x, y and the uniform constant are read by every active thread; y is written
    assert st["global_store"]["bytes"] == 4000
    assert st["global_store"]["efficiency"] == 1.0
    assert st["global_load"]["bytes"] >= 8000


@pytest.mark.nightly
@pytest.mark.needs("sm90_f16")
def test_stats_gemm(sim, tmp_path):
    f = tmp_path / "st.json"
    sim.config(stats=f)
    M, N, K = 128, 128, 512
    a, b, d = (sim.dev(np.zeros((M, K), np.float16)) for _ in range(3))
    assert sim.lib("sm90_f16").sm90_f16_pingpong_1x1(M, N, K, 1, a, b, d, d, ctypes.c_float(1), ctypes.c_float(0)) == 0
    st = json.loads(f.read_text())[-1]
    assert st["wgmma_macs"] == M * N * K
    assert st["tma_load_bytes"] == (M + 2 * N) * K * 2
    assert st["tma_store_bytes"] == M * N * 2
    assert st["classes"]["wgmma"] > 0
    assert st["shared"]["bank_conflict_factor"] >= 1


@pytest.mark.needs("instr")
def test_host_arrays(sim):
    """Registered numpy arrays serve as device pointers, under PTXSIM_CHECK too."""
    sim.config(check=1)
    n = 256
    a = np.arange(n, dtype=np.uint32)
    o = np.zeros(n, np.uint32)

    def p(x):
        return ctypes.c_void_p(x.ctypes.data)

    sim.rt.ptxsim_register(p(a), ctypes.c_size_t(a.nbytes))
    sim.rt.ptxsim_register(p(o), ctypes.c_size_t(o.nbytes))
    assert sim.lib("instr").i_add(n, p(a), p(a), p(a), p(o)) == 0, sim.report()
    assert np.array_equal(o, 2 * a)
    sim.rt.ptxsim_unregister(p(o))
    assert sim.lib("instr").i_add(n, p(a), p(a), p(a), p(o)) != 0
    assert "out of bounds" in sim.report()
    sim.rt.ptxsim_unregister(p(a))
