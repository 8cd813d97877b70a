"""What a call asks of the device, counted by the simulator, and a call captured into a graph of its own."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import simulator
from torch import Tensor

RELAXED = 2  # cudaStreamCaptureModeRelaxed: torch allocates in it


def ok(status: int) -> None:
    report = simulator.runtime.ptxsim_last_report() if simulator.runtime is not None else None
    assert status == 0, f"simulated CUDA error {status}: {(report or b'').decode()}"


def counted(call: Callable[[], Any]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """How many nodes of each kind a call makes, and the kernels among them."""
    runtime = simulator.runtime
    assert runtime is not None
    runtime.ptxsim_config(b"PTXSIM_SUMMARY", b"1")
    runtime.ptxsim_summary_reset()
    try:
        call()
        summary = json.loads(runtime.ptxsim_summary())
    finally:
        runtime.ptxsim_config(b"PTXSIM_SUMMARY", None)
    return summary["counts"], [node for node in summary["nodes"] if node["node"] == "kernel"]


class Captured:
    """What a call would have launched on a stream."""

    def __init__(self, device: Any, stream: int, call: Callable[[], Tensor]) -> None:
        self._runtime, self._stream = simulator.runtime, ctypes.c_void_p(stream)
        graph, self._graph, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        ok(self._runtime.cudaStreamBeginCapture(self._stream, RELAXED))
        with device.on_stream(stream, keep=True):
            try:
                self.out = call()
            finally:
                status = self._runtime.cudaStreamEndCapture(self._stream, ctypes.byref(graph))
        ok(status)
        ok(self._runtime.cudaGraphGetNodes(graph, None, ctypes.byref(count)))
        ok(self._runtime.cudaGraphInstantiate(ctypes.byref(self._graph), graph, ctypes.c_ulonglong(0)))
        ok(self._runtime.cudaGraphDestroy(graph))
        self.nodes = count.value

    def __call__(self) -> None:
        ok(self._runtime.cudaGraphLaunch(self._graph, self._stream))

    def free(self, device: Any) -> None:
        ok(self._runtime.cudaGraphExecDestroy(self._graph))
        with device.on_stream(0):
            pass
