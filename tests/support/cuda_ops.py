"""torch.ops.pyquant as a CUDA device serves it: on a GPU, or on the PTX simulator.

On the simulator the bindings come from libpyquant_torch_sim.so: the source of the CUDA ones, compiled for CPU tensors
that lie in the simulator's memory, under the library name pyquant_sim. What the CUDA key gets from Python
(pyquant.ops.fallback.ON_CUDA) it gets too, so `torch.ops.pyquant_sim` is to CPU tensors what `torch.ops.pyquant` is to
CUDA tensors. Nothing of it is part of the package's interface.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import simulator
import torch
from gpu_device import SimulatorMemory
from torch import Tensor

from pyquant import ops
from pyquant.ops import fallback
from pyquant.ops.load import LIBRARY
from pyquant.ops.schema import NATIVE, SCHEMAS

NAME = "libpyquant_torch_sim.so"


class CudaOps:
    """`device.qlinear(x, ...)` is `pyquant.ops.qlinear` with every tensor on the device and the result back."""

    is_simulator = False
    mode_name = "plain"

    def put(self, value: Any) -> Any:
        """A tensor (or a container's tensors) on the device, strides kept; anything else as it is."""
        return value.cuda() if isinstance(value, Tensor) else value

    def get(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.get(item) for item in value)
        return value.cpu() if isinstance(value, Tensor) else value

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """pyquant's functions reach the device's implementations inside."""
        yield

    def mode(self, name: str) -> None:
        """How the simulator runs launches (gpu_device.MODES); a GPU has one way."""

    def finish(self) -> None:
        torch.cuda.synchronize()

    def __getattr__(self, name: str) -> Any:
        if name not in SCHEMAS:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            there, named = [self.put(a) for a in args], {key: self.put(value) for key, value in kwargs.items()}
            with self.serving():
                result = getattr(ops, name)(*there, **named)
            self.finish()
            return self.get(result)

        return call


class SimulatedOps(CudaOps):
    is_simulator = True

    def __init__(self, library: Path) -> None:
        self._memory = SimulatorMemory()
        self._definitions = torch.library.Library("pyquant_sim", "DEF")
        for name, schema in SCHEMAS.items():
            self._definitions.define(name + schema)
        for name in ("_grouped_linear", "_grouped_weight_only"):
            self._definitions.define(name + NATIVE[name])
        self._definitions.define("to_device(Tensor x) -> Tensor")
        self._definitions.define("allocations(Tensor like) -> int")
        self._definitions.define("use_stream(Tensor like, int stream, bool keep) -> ()")
        torch.ops.load_library(str(library))
        for name in fallback.ON_CUDA:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"pyquant_sim::{name}", "CPU"):
                continue
            self._definitions.impl(name, fallback.IMPLEMENTATIONS[name], "CPU")

    def put(self, value: Any) -> Any:
        return torch.ops.pyquant_sim.to_device(value) if isinstance(value, Tensor) else value

    def get(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.get(item) for item in value)
        return value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        # Where functions call ops; the package's own names of some of them are functions.
        modules = [sys.modules[f"pyquant.ops.{name}"] for name in ("functional", "linear", "fake_quantize", "conv")]
        previous = modules[0]._ops
        try:
            for module in modules:
                module._ops = torch.ops.pyquant_sim  # type: ignore[attr-defined]
            yield
        finally:
            for module in modules:
                module._ops = previous  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def on_stream(self, stream: int, keep: bool = False) -> Iterator[None]:
        """This thread's launches go to the simulator's stream inside. keep: memory that tensors leave is kept until the
        thread's next use of a stream, for a graph that was captured meanwhile."""
        torch.ops.pyquant_sim.use_stream(torch.empty(0), stream, keep)
        yield
        if not keep:
            torch.ops.pyquant_sim.use_stream(torch.empty(0), 0, False)

    def mode(self, name: str) -> None:
        self.mode_name = name
        self._memory.mode(name)

    def finish(self) -> None:
        status = simulator.runtime.cudaDeviceSynchronize()
        if status != 0:
            report = (simulator.runtime.ptxsim_last_report() or b"").decode()
            simulator.runtime.ptxsim_reset()
            raise RuntimeError(f"simulated CUDA error {status}: {report}")


_found: CudaOps | str | None = None


def cuda_ops() -> CudaOps | str:
    """The device at hand, or why there is none."""
    global _found
    if _found is None:
        _found = _find()
    return _found


def _find() -> CudaOps | str:
    if simulator.runtime is None:
        return CudaOps() if torch.cuda.is_available() else f"no GPU, and no simulator: {simulator.why_not}"
    library = LIBRARY.parent / NAME
    if not library.exists():
        return f"{NAME} is not there: build with PYQUANT_SIMULATOR=ON, nvcc and torch >= 2.11"
    return (
        SimulatedOps(library) if ops.native_available() else f"the CPU's ops are the reference: {ops.why_not_native()}"
    )
