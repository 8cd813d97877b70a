"""Launches whose dynamic shared memory ends just below 48 KiB, where a kernel's static memory decides whether the
driver takes them: each as the first one of its kernel, in a process of its own, because a kernel that once opted in to
more takes them for ever after."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_device import memory

TESTS = Path(__file__).resolve().parents[1]
TYPES = {torch.float32: 12288, torch.float16: 24576, torch.bfloat16: 24576}  # columns of 48 KiB a row


def quantisers() -> Iterator[str]:
    """The quantisers of whole rows, every element type, rows of 48 KiB; yields the names of those that are wrong."""
    import accept
    from cuda_ops import CudaOps, cuda_ops

    from pyquant import ops

    device = cuda_ops()
    assert isinstance(device, CudaOps), device
    generator = torch.Generator().manual_seed(1)
    for dtype, k in TYPES.items():
        x = torch.randn(2, k, generator=generator).to(dtype)
        rows = torch.randn(2, 12288, generator=generator).to(dtype)
        gates = torch.randn(2, 2 * 12288, generator=generator).to(dtype)
        calls = {
            "quantize_dynamic": (x,),
            "fake_quantize_dynamic": (x,),
            "rms_norm_quantize": (rows,),
            "layer_norm_quantize": (rows,),
            "add_rms_norm_quantize": (rows, rows.flip(0)),
            "silu_mul_quantize": (gates,),
            "activation_mul_quantize": (rows, rows.flip(0), "gelu"),
            "hadamard_quantize": (rows, 4096),
        }
        for name, operands in calls.items():
            try:
                for got, want in zip(getattr(device, name)(*operands), getattr(ops, name)(*operands), strict=True):
                    rule = accept.t1 if want.is_floating_point() else accept.t0
                    rule(got, want, what=name, waiver="zero points are constant")
            except (RuntimeError, AssertionError) as error:
                yield f"{name} {dtype} {list(operands[0].shape)}: {error}"


def decode() -> Iterator[str]:
    """Every compiled decode row that adds up in memory, a whole tile of tokens."""
    from test_decode import NATIVE, ROWS, _case, _check

    device = memory()
    assert not isinstance(device, str), device
    for name, row in ROWS.items():
        if row["sm_min"] < 90:
            try:
                _check(NATIVE, device, name, _case(name, row["tile"][0], 40, 288))
            except (RuntimeError, AssertionError) as error:
                yield f"{name}: {error}"
                device.free()


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("what", [quantisers, decode], ids=lambda what: what.__name__)
def test_the_first_launch_may_be_the_largest_that_needs_no_permission(
    native: Any, what: Callable[[], Iterator[str]]
) -> None:
    if what is decode and not any(
        r["compiled"] and r["engine"] == "decode" and r["sm_min"] < 90 for r in native.kernel_table()
    ):
        pytest.skip("no such decode row is compiled into this build")
    script = f"import simulator, test_shared_edge; print(*test_shared_edge.{what.__name__}(), 'done', sep='\\n')"
    folders = [*(str(TESTS / name) for name in ("support", ".", "gpu", "..")), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n") == ["done", ""]
