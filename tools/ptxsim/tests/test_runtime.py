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


@pytest.fixture
def stream(sim):
    made = ctypes.c_void_p()
    assert sim.rt.cudaStreamCreate(ctypes.byref(made)) == 0
    return made


def test_a_captured_stream_runs_when_its_graph_is_launched(sim, stream):
    """Launches of kernels: tests/gpu/test_streams.py."""
    memory, back = sim.dev(np.zeros(64, np.uint8)), sim.dev(np.zeros(64, np.uint8))
    nbytes, graph, executable, count = ctypes.c_size_t(64), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()

    def held(pointer):
        out = np.empty(64, np.uint8)
        assert sim.rt.cudaMemcpy(ctypes.c_void_p(out.ctypes.data), pointer, nbytes, 2) == 0
        return out

    assert sim.rt.cudaStreamBeginCapture(stream, 0) == 0
    assert sim.rt.cudaMemsetAsync(memory, 7, nbytes, stream) == 0
    assert sim.rt.cudaMemcpyAsync(back, memory, nbytes, 3, stream) == 0
    assert sim.rt.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert not held(back).any(), "nothing has run"
    assert sim.rt.cudaGraphGetNodes(graph, None, ctypes.byref(count)) == 0
    assert count.value == 2
    assert sim.rt.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0
    assert sim.rt.cudaGraphDestroy(graph) == 0
    for _ in range(2):
        assert sim.rt.cudaMemset(back, 0, nbytes) == 0
        assert sim.rt.cudaGraphLaunch(executable, stream) == 0
        assert (held(back) == 7).all()
    assert sim.rt.cudaGraphExecDestroy(executable) == 0


@pytest.mark.parametrize(
    "refused",
    [
        lambda sim, stream: sim.rt.cudaDeviceSynchronize(),
        lambda sim, stream: sim.rt.cudaStreamSynchronize(stream),
        lambda sim, stream: sim.rt.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(8)),
        lambda sim, stream: sim.rt.cudaMemsetAsync(sim.kept, 0, ctypes.c_size_t(8), None),
    ],
    ids=["device", "stream", "malloc", "legacy stream"],
)
def test_what_cannot_be_captured_spoils_the_capture(sim, stream, refused):
    sim.kept, graph = sim.dev(np.zeros(8, np.uint8)), ctypes.c_void_p(1)
    assert sim.rt.cudaStreamBeginCapture(stream, 0) == 0
    assert refused(sim, stream) in (900, 906)  # cudaErrorStreamCaptureUnsupported, ...Implicit
    assert "while a stream is captured" in sim.report()
    assert sim.rt.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 901  # cudaErrorStreamCaptureInvalidated
    assert graph.value is None
    assert sim.rt.cudaDeviceSynchronize() == 0
