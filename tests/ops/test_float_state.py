"""The caller's floating-point state is its own: how it rounds, what becomes of subnormal numbers, which errors trap.

Threads of a pool have the state that they began with, so that results would depend on who computed them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pyquant import ops

PROGRAM = """
import ctypes, hashlib, sys
import torch
import pyquant
from pyquant import ops
from op_samples import samples

libm = ctypes.CDLL("libm.so.6")

def states():
    for mode in (0x400, 0x800, 0xC00):
        yield lambda: libm.fesetround(mode), lambda: libm.fesetround(0)
    yield lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)
    yield lambda: libm.feenableexcept(0x1D), lambda: libm.fedisableexcept(0x1D)  # all but subnormal operands

def digest(results):
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in results)).hexdigest()

FLOAT_SUMS = ("float_linear", "gemm", "weight_only_linear")  # torch's own products, or outside of the contract

def cases():
    generator = torch.Generator().manual_seed(3)
    for scale in (1.0, 1e-36, 1e-39):
        x = torch.randn(300, 1000, generator=generator) * scale
        yield f"dynamic {scale}", lambda x=x: ops.quantize_dynamic(x, "per_token", 0, False, -128, 127)
        yield f"fake {scale}", lambda x=x: ops.fake_quantize_dynamic(x, "per_group", 100)
        yield f"norm {scale}", lambda x=x: ops.rms_norm_quantize(x)
        yield f"gate {scale}", lambda x=x: ops.silu_mul_quantize(x)
        if scale == 1.0:
            yield f"steps {scale}", lambda x=x: [torch.ops.pyquant._least_squares_steps(
                x.reshape(-1, 250), -7, 7, torch.exp2(-torch.arange(40).double() / 16))]
    for name, arguments in samples(66, 130, 96).items():
        if name in FLOAT_SUMS or name.endswith(("_", "_out")):
            continue
        op = getattr(torch.ops.pyquant, name).default
        def call(op=op, arguments=arguments):
            result = op(*arguments)
            return [result] if isinstance(result, torch.Tensor) else result
        yield name, call
    for scheme in ("W8A8Dynamic", "W4A8Dynamic(group_size=250)"):
        torch.manual_seed(1)
        layer = pyquant.quantize_(torch.nn.Sequential(torch.nn.Linear(1000, 520)), scheme)
        rows = torch.randn(70, 1000, generator=generator)
        with torch.no_grad():
            yield scheme, lambda layer=layer, rows=rows: [layer(rows)]

found = []
torch.set_num_threads(2)
with torch.no_grad():
    for name, call in cases():
        want = digest(call())
        for i, (enter, leave) in enumerate(states()):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                enter()
                try:
                    got = call()
                finally:
                    leave()
                if digest(got) != want:
                    found.append((name, i, threads))
print(found)
"""
FIRST = """
import ctypes, sys
import torch
from pyquant import ops
libm = ctypes.CDLL("libm.so.6")
x = torch.randn(8, 64)
if sys.argv[1] == "trap":
    libm.feenableexcept(0x1D)
else:
    libm.fesetround(0x800)
ops.quantize_dynamic(x)
print(torch.ops.pyquant._cpu_info())
"""


def run(program: str, *arguments: str) -> str:
    if not ops.native_available():
        pytest.skip(f"compiled library not in use: {ops.why_not_native()}")
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        pytest.skip("the numbers of states are those of glibc on x86_64")
    folders = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_results_have_the_same_bits_in_every_state_and_on_every_number_of_threads() -> None:
    assert run(PROGRAM) == "[]"


@pytest.mark.parametrize("state", ["round", "trap"])
def test_a_first_call_in_another_state_finds_the_same_kernels(state: str) -> None:
    """The verdict of the self-test is for good."""
    assert "FAILED" not in run(FIRST, state)
