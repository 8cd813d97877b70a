"""A driver that is absent or too old, a chip or a build that does not fit: import works, CPUs compute, doctor says why.

The driver is simulated where pyquant's CUDA runtime looks for it: a libcuda.so.1 that knows its version, no more.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pyquant
from pyquant import diagnosis
from pyquant.measure.gpu_runtime import GpuRuntime, gpu_lines, gpu_problems, gpu_runtime

DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long long flags, void* status) {
  *found = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
  return *found ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** found, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""
# A process of its own: the runtime looks for the driver once.
ASK = """
import pyquant, torch
layer = torch.nn.Sequential(torch.nn.Linear(64, 32))
pyquant.quantize_(layer, pyquant.W8A8Dynamic())
x = torch.randn(5, 64)
assert torch.equal(layer(x), layer[0].reference(x))
from pyquant.measure.gpu_runtime import gpu_lines, gpu_runtime
seen = gpu_runtime()
print(seen.own_gpus, seen.driver_cuda, seen.why_no_gpu, sep="|")
print(*gpu_lines(seen), sep="\\n")
"""
BUILD = {
    "cuda": True,
    "why_no_cuda": "",
    "architectures": "80;90a",
    "nvcc": "13.0.88",
    "cuda_runtime": 13000,
    "minimum_driver": 580,
}
A10 = ("NVIDIA A10", (8, 6))
GOOD = GpuRuntime("13.0", (A10,), "", BUILD, 1, "", 13000)
OLD = "the NVIDIA driver serves CUDA 12.8; pyquant's CUDA runtime is 13.0, which needs driver 580 or newer"


@pytest.fixture
def native() -> Any:
    module = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    if not module.build_info()["cuda"]:
        pytest.skip("pyquant was built without CUDA kernels")
    return module


def ask(libraries: Path | None = None) -> list[str]:
    """The lines of a fresh process, whose driver lies in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pyquant.__file__).parents[1])}
    environment |= {"LD_LIBRARY_PATH": str(libraries)} if libraries else {}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_old_driver_is_told_with_both_versions(native: Any, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler to make a driver with")
    info = native.build_info()
    old = info["cuda_runtime"] - 1000  # of the major version before
    (tmp_path / "driver.c").write_text(DRIVER.replace("VERSION", str(old)))
    words = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c", "-ldl"]
    subprocess.run(words, cwd=tmp_path, check=True)
    first, *lines = ask(tmp_path)
    assert first.split("|")[:2] == ["0", str(old)]
    assert f"serves CUDA {old // 1000}." in first
    assert f"needs driver {info['minimum_driver']} or newer" in first
    assert any("no GPU for pyquant: the NVIDIA driver serves" in line for line in lines)


def test_an_absent_driver_is_told(native: Any) -> None:
    if native.driver_cuda_version():
        pytest.skip("there is a driver")
    first, *lines = ask()
    assert first == "0|0|no NVIDIA driver was found"
    assert "no GPU for pyquant: no NVIDIA driver was found" in lines


def test_the_build_that_is_here_says_what_it_needs() -> None:
    pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    seen = gpu_runtime()
    if seen.build["cuda"]:
        assert seen.build["minimum_driver"] == (580 if seen.build["cuda_runtime"] >= 13000 else 530)
        assert f"needs driver {seen.build['minimum_driver']}" in "\n".join(gpu_lines(seen))
    else:
        assert seen.build["why_no_cuda"] in "\n".join(gpu_lines(seen))
        assert "built without CUDA kernels: " + seen.build["why_no_cuda"] == seen.why_no_gpu


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"own_gpus": 0, "why_no_gpu": OLD, "driver_cuda": 12080}, ["torch sees 1 GPU", OLD]),
        ({"build": {**BUILD, "cuda": False, "why_no_cuda": "there was no nvcc"}}, ["for CPUs only: there was no nvcc"]),
        ({"native_error": "pyquant._native cannot be imported"}, ["torch sees 1 GPU", "cannot be imported"]),
        ({"torch_gpus": (A10, ("NVIDIA T4", (7, 5)))}, ["NVIDIA T4 has compute capability 7.5", "need 8.0"]),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_problem_with_its_reason(
    change: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dataclasses.replace(GOOD, **change)
    (problem,) = gpu_problems(seen)
    assert all(words in problem for words in told)
    monkeypatch.setattr(diagnosis, "gpu_runtime", lambda: seen)
    monkeypatch.setattr(diagnosis, "_capabilities", lambda device: [])
    monkeypatch.setattr(diagnosis, "_cuda_lines", gpu_lines)
    found = pyquant.doctor()
    assert problem in found.problems
    assert problem in str(found)
    assert not found.ok


def test_a_gpu_that_fits_is_none() -> None:
    assert gpu_problems(GOOD) == []
    assert gpu_problems(dataclasses.replace(GOOD, torch_gpus=())) == []
