"""Runs pyquant's CUDA kernels without a GPU: on the PTX simulator named by PYQUANT_CUDART_SIM.

The simulator stands in for libcudart.so.13. It is loaded first and globally; then the flavour of our core library that
looks its CUDA runtime up at load time. That flavour carries the name libpyquant_core.so, so that whatever is imported
later (pyquant._native, libpyquant_torch.so) uses it too: the whole process has one core library.

tests/conftest.py imports this module before anything imports pyquant; importing it without the variable does nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

NAME = "libpyquant_core_sim.so"
runtime: ctypes.CDLL | None = None
why_not: str | None = None


def _core_library() -> Path | None:
    spec = importlib.util.find_spec("pyquant")  # finds the package without importing it
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders if (path := Path(folder) / "lib" / NAME).exists()), None)


def _load() -> str | None:
    """Loads both libraries; returns why not."""
    global runtime
    simulator = os.environ.get("PYQUANT_CUDART_SIM")
    if not simulator:
        return "PYQUANT_CUDART_SIM does not name a PTX simulator"
    if not Path(simulator).exists():
        raise FileNotFoundError(f"PYQUANT_CUDART_SIM names {simulator}, which does not exist")
    core = _core_library()
    if core is None:
        return f"{NAME} is not there: build with PYQUANT_SIMULATOR=ON and nvcc"
    runtime = ctypes.CDLL(simulator, mode=ctypes.RTLD_GLOBAL)
    runtime.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    runtime.cudaFree.argtypes = [ctypes.c_void_p]
    runtime.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    runtime.ptxsim_last_report.restype = ctypes.c_char_p
    runtime.ptxsim_summary.restype = ctypes.c_char_p
    runtime.ptxsim_config.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    ctypes.CDLL(str(core), mode=ctypes.RTLD_GLOBAL)
    return None


why_not = _load()
