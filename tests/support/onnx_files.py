"""ONNX files, run by onnxruntime as a user runs them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    """The file in a session of its own."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feed)]
