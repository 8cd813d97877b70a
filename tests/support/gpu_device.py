"""Device memory for the kernel tests, the same words for the simulator and a GPU."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import simulator
import torch
from torch import Tensor

SENTINEL = 0x5A  # what an output buffer holds before the launch

# How the simulator runs a launch: completion of asynchronous copies, order of warps, checks.
MODES: dict[str, dict[str, str]] = {
    "plain": {},
    "checked": {"PTXSIM_CHECK": "1"},
    "lazy": {"PTXSIM_ASYNC": "lazy", "PTXSIM_SCHED": "ranked:1"},
    "random": {"PTXSIM_ASYNC": "random:1", "PTXSIM_SCHED": "2"},
}
# The two modes that each case of a test runs in: one of how results are computed, one of when.
PAIRS = (("plain", "lazy"), ("checked", "random"), ("plain", "random"), ("checked", "lazy"))
T = TypeVar("T")
VARIABLES = ("PTXSIM_ASYNC", "PTXSIM_SCHED", "PTXSIM_CHECK")


class Memory:
    """Buffers that live until `free`. `pointer = memory.put(tensor)`, `tensor = memory.get(pointer, ...)`."""

    is_simulator: bool
    mode_name = "plain"

    def put(self, tensor: Tensor | None) -> int:
        raise NotImplementedError

    def get(self, pointer: int, nbytes: int) -> Tensor:
        """The bytes as uint8, after everything launched has finished."""
        raise NotImplementedError

    def free(self) -> None:
        raise NotImplementedError

    def mode(self, name: str) -> None:
        """Chooses how launches run; a GPU has one way."""

    def count(self, path: Path | None) -> None:
        """Writes the simulator's counters of the launches to come to a file; None ends it."""


class SimulatorMemory(Memory):
    is_simulator = True

    def __init__(self) -> None:
        self.runtime = simulator.runtime
        self.pointers: list[int] = []

    def _ok(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"simulated CUDA error {status}: {(self.runtime.ptxsim_last_report() or b'').decode()}")

    def put(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        data = tensor.contiguous()
        nbytes = max(data.numel() * data.element_size(), 1)
        pointer = ctypes.c_void_p()
        self._ok(self.runtime.cudaMalloc(ctypes.byref(pointer), nbytes))
        self.pointers.append(pointer.value)
        if data.numel():
            self._ok(self.runtime.cudaMemcpy(pointer, data.data_ptr(), nbytes, 1))
        return pointer.value

    def get(self, pointer: int, nbytes: int) -> Tensor:
        self._ok(self.runtime.cudaDeviceSynchronize())
        out = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self._ok(self.runtime.cudaMemcpy(out.data_ptr(), pointer, nbytes, 2))
        return out

    def free(self) -> None:
        self.runtime.ptxsim_reset()
        for pointer in self.pointers:
            self.runtime.cudaFree(pointer)
        self.pointers.clear()

    def mode(self, name: str) -> None:
        self.mode_name = name
        for variable in VARIABLES:
            value = MODES[name].get(variable)
            self.runtime.ptxsim_config(variable.encode(), None if value is None else value.encode())

    def count(self, path: Path | None) -> None:
        self.runtime.ptxsim_config(b"PTXSIM_STATS", None if path is None else str(path).encode())


class GpuMemory(Memory):
    is_simulator = False

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}

    def put(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        nbytes = max(tensor.numel() * tensor.element_size(), 1)
        flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        if tensor.numel():
            flat.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        torch.cuda.synchronize()
        self.tensors[flat.data_ptr()] = flat
        return flat.data_ptr()

    def get(self, pointer: int, nbytes: int) -> Tensor:
        torch.cuda.synchronize()
        return self.tensors[pointer][:nbytes].cpu()

    def free(self) -> None:
        self.tensors.clear()


def memory() -> Memory | str:
    """The device at hand, or why there is none."""
    if simulator.runtime is not None:
        return SimulatorMemory()
    if torch.cuda.is_available():
        return GpuMemory()
    return f"no GPU, and no simulator: {simulator.why_not}"


def shared_out(where: Any, cases: Iterable[T], *key: object) -> list[T]:
    """Of a test's cases, three at least, those that run in the mode that `where` is in: half of them and one at least,
    each case in two modes; in which ones, the key says. On a GPU, which has one mode, and nightly all of them."""
    every = list(cases)
    if not where.is_simulator or os.environ.get("PYQUANT_NIGHTLY", "") not in ("", "0"):
        return every
    first = zlib.crc32(repr(key).encode())
    return [case for index, case in enumerate(every) if where.mode_name in PAIRS[(first + index) % len(PAIRS)]]
