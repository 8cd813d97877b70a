"""ONNX files, run by onnxruntime as a user runs them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

_CPU = Path("/proc/cpuinfo")
HAS_VNNI = _CPU.exists() and any(flag in _CPU.read_text() for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))
needs_vnni = pytest.mark.skipif(
    not HAS_VNNI, reason="without VNNI onnxruntime's sums of unsigned by signed codes saturate (docs/onnx.md)"
)
saturates = pytest.mark.skipif(HAS_VNNI, reason="with VNNI onnxruntime's sums are exact")


def _read_torchlib_once() -> None:
    """torch reads the sources of all of onnxscript's functions at every export, more than a second: here the first of
    a process does so for all of the same opset."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # its own affair, which another release may have elsewhere
        return
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))  # type: ignore[method-assign]


_read_torchlib_once()


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    """The file in a session of its own."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feed)]


def names(path: Path) -> tuple[list[str], list[str]]:
    """What onnxruntime calls the inputs and the outputs of a file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [one.name for one in session.get_inputs()], [one.name for one in session.get_outputs()]
