"""The raw rows of the benchmark, launched as it launches them: every compiled row that it can name gives its bits.

The tensors lie on the CPU, so each operand is carried to the device and the result back, by the pointers of the call.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_device import Memory

from pyquant.bench.kernels import rows
from pyquant.bench.peers import PeerUnavailable
from pyquant.bench.problem import Inputs, Weights

M, K, N = 33, 256, 136


class Carried:
    """pyquant._native whose gemm takes pointers to the CPU's memory."""

    def __init__(self, native: Any, device: Memory) -> None:
        self.native, self.device = native, device
        self.launched: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def gemm(self, row: str, problem: dict, operands: dict, epilogue: dict, index: int, stream: int) -> None:
        m, n, k = problem["m"], problem["n"], problem["k"]
        sizes = {"x": m * k, "w": n * k, "x_scale": 4 * m, "w_scale": 4 * n, "bias": 4 * n, "out": 2 * m * n}
        sizes["workspace"] = self.native.workspace_bytes(row, problem, 0)
        there = {
            name: self.device.put(torch.frombuffer(bytearray(ctypes.string_at(at, sizes[name])), dtype=torch.uint8))
            for name, at in operands.items()
        }
        self.native.gemm(row, problem, there, epilogue)
        out = self.device.get(there["out"], sizes["out"])
        ctypes.memmove(operands["out"], out.data_ptr(), sizes["out"])
        self.launched.append(row)


def test_rows_by_name_give_the_specifications_bits(
    native: Any, plain_device: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = Carried(native, plain_device)
    monkeypatch.setattr(rows, "native", lambda: carried)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    weights = Weights(K, N, torch.device("cpu", 0))
    inputs, ran = Inputs(weights, M), []
    adapters = [*rows.ROWS, *rows.rows_matching("", native.kernel_table())]
    for adapter in adapters:
        built = adapter.build(weights)
        try:
            run = built.bind(inputs)
        except PeerUnavailable as why:
            assert "row" in str(why) or "not compiled" in str(why)  # noqa: PT017
            continue
        try:
            y = run(built.state)
        except ValueError:  # the row refuses this problem and says why
            continue
        assert torch.equal(y, built.reference(inputs, torch.arange(M))), adapter.name
        assert built.kernel(M) == carried.launched[-1]
        ran.append(adapter.name)
        plain_device.free()
    assert rows.CHOSEN in ran
    assert len(ran) >= 2
