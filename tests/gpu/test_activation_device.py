"""gelu and silu give the same bits in a CUDA kernel as on the host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "csrc" / "activation_device.cu"
STRIDE = 3989  # a million patterns


@pytest.mark.gpu
def test_device_and_host_give_equal_bits(tmp_path: Path) -> None:
    simulator = os.environ.get("PYQUANT_CUDART_SIM")
    if not simulator and not torch.cuda.is_available():
        pytest.skip("no GPU, and PYQUANT_CUDART_SIM names no simulator")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    program = tmp_path / "activation_device"
    # PTX for the oldest architecture: a GPU compiles it when it loads it, the simulator reads it as it is.
    # The simulator stands in for the shared runtime, which a GPU machine need not have on its loader's path.
    cudart = "shared" if simulator else "static"
    flags = ["-std=c++17", "-O3", "-no-compress", "-gencode", "arch=compute_80,code=compute_80", "-cudart", cudart]
    flags += ["-Xcompiler", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
    built = subprocess.run([nvcc, *flags, str(SOURCE), "-o", str(program)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    environment = dict(os.environ)
    if simulator:
        folders = [str(Path(simulator).resolve().parent), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    ran = subprocess.run(
        [str(program), str(STRIDE)], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(re.search(r"checked=(\d+)", ran.stdout)[1]) > 1_000_000, ran.stdout
