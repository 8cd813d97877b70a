"""int4 activations two a byte: the ops, and a chain of modules from floats to floats, on a chip whose int4 tensor cores
read them so, bit for bit as on the CPU. On the simulator that is an A100, in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

TESTS = Path(__file__).resolve().parents[1]
SIZES = (256, 128, 64, 96, 32)  # of a chain; 96 = 3 x 32 codes


@contextlib.contextmanager
def modules_on_the_device(device) -> Iterator[None]:
    """QLinear and Quantize on the simulator's ops and layout, as a CUDA device would have them."""
    import pyquant.nn.linear_call as call
    from pyquant import ops

    there = torch.ops.pyquant_sim
    held = call._qlinear, ops.packs_int4, ops.layout_for
    call._qlinear = there.qlinear.default
    ops.packs_int4 = lambda device, columns: columns % 32 == 0
    ops.layout_for = lambda device, spec=None: "rows"
    try:
        with device.serving():
            yield
    finally:
        call._qlinear, ops.packs_int4, ops.layout_for = held


def chain(outputs: bool) -> nn.Module:
    import pyquant
    from pyquant.nn.chain import Dequantize, QSequential, Quantize

    torch.manual_seed(3)
    inputs = pyquant.W4A4().inputs
    scales = [torch.tensor([0.3]), *(torch.tensor([0.12]) for _ in SIZES[1:])]
    layers = []
    for i, (k, n) in enumerate(itertools.pairwise(SIZES)):
        layer = pyquant.QLinear.from_float(nn.Linear(k, n), pyquant.W4A4(), input_scale=scales[i], activation="relu")
        is_last = i == len(SIZES) - 2
        layers.append(layer if is_last and not outputs else layer.with_outputs(inputs, scales[i + 1]))
    return QSequential(Quantize(scales[0], scheme=inputs), *layers, *([Dequantize()] if outputs else []))


def launches_of(path: Path) -> list[str]:
    return [launch["kernel"] for launch in json.loads(path.read_text())]


def check() -> str:
    """In a process of its own, on an A100. -> 'done'."""
    import accept
    import simulator
    from cuda_ops import cuda_ops
    from problems import Draw

    from pyquant import ops
    from pyquant.nn.chain import Quantize

    device = cuda_ops()
    assert not isinstance(device, str), device
    draw = Draw(1, "int4 packed")
    for m, n, k in ((1, 32, 64), (17, 24, 96), (40, 130, 256), (5, 16, 40)):  # 40: no multiple of 32
        x, w = draw.codes(-8, 7, m, k).to(torch.int8), ops.pack_int4(draw.codes(-8, 7, n, k).to(torch.int8))
        call = {"w_scale": torch.rand(n) + 0.1, "x_scale": torch.rand(m) + 0.1, "bias": draw.normal(n)}
        call |= {"x_zero_point": draw.codes(-8, 7, m)}
        want = ops.gemm_s4s4(x, w, **call)
        packed = ops.pack_int4(x)
        for given in (x, packed):
            accept.t1(device.gemm_s4s4(given, w, **call), want, what=f"{m} {n} {k} {given.dtype}")
        accept.t1(device.gemm(packed, w, **call), want, what="gemm")
        accept.t1(ops.gemm_s4s4(packed, w, **call), want, what="the CPU's own")
        if k % 32 == 0:
            accept.t1(device.gemm(packed, w, **call, kernel="gemm_sm80_s4s4_16x64x256_splitk"), want, what="by name")
    # a layer with a scale a token takes them packed too
    spec = ops.LinearSpec(24, 64, w_bits=4, x_qmin=-7, x_qmax=7).to_ints()
    here = ops.LinearSpec(24, 64, w_bits=4, x_qmin=-7, x_qmax=7, layout=ops.layout_for(torch.device("cpu"))).to_ints()
    x, w = draw.codes(-7, 7, 9, 64).to(torch.int8), ops.pack_int4(draw.codes(-7, 7, 24, 64).to(torch.int8))
    scale, x_scale = torch.rand(24) + 0.1, torch.rand(9) + 0.1
    want = ops.qlinear(x, ops.pack_linear(w, scale, here), None, here, None, x_scale)
    got = device.qlinear(ops.pack_int4(x), device.pack_linear(w, scale, spec), None, spec, None, x_scale)
    accept.t1(got, want, what="a scale a token")

    x = draw.normal(19, SIZES[0])
    for outputs in (False, True):
        want = chain(outputs)(x)
        with tempfile.TemporaryDirectory() as folder, modules_on_the_device(device):
            model = chain(outputs)
            codes = model[0](x)
            assert type(codes).__name__ == "PackedQTensor", codes
            assert codes.data.shape == (19, SIZES[0] // 2)
            stats = Path(folder) / "launches.json"
            simulator.runtime.ptxsim_config(b"PTXSIM_STATS", str(stats).encode())
            between = model[1](codes)
            simulator.runtime.ptxsim_config(b"PTXSIM_STATS", None)
            assert type(between).__name__ == "PackedQTensor", between
            (kernel,) = launches_of(stats)  # nothing packs, nothing unpacks
            assert "integer_subbyte" in kernel, kernel
            got = device.get(model(x))
            device.finish()
        accept.t1(got, want, what=f"chain, outputs {outputs}")
        assert isinstance(Quantize(0.5)(x).data, torch.Tensor)
    return "done"


def test_chains_reach_the_int4_tensor_cores(native) -> None:
    import simulator

    if simulator.runtime is None:
        pytest.skip(f"a GPU has its own test (test_reliability.py); no simulator: {simulator.why_not}")
    if not any(row["compiled"] and row["name"] == "gemm_sm80_s4s4_16x64x256_splitk" for row in native.kernel_table()):
        pytest.skip("gemm_sm80_s4s4_16x64x256_splitk is not compiled into this build")
    folders = [*(str(TESTS / name) for name in ("support", ".", "gpu", "..")), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", "import simulator, test_int4_packed; print(test_int4_packed.check())"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PTXSIM_DEVICE": "a100", "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "done"
