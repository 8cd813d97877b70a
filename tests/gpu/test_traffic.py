"""What a launch moves, counted by the simulator: every block of blocked weights crosses the bus once, shared memory is
read without bank conflicts, and nothing is multiplied in vain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import simulator
import torch
from gpu_device import Memory

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
# Those that fetch blocks by bulk copies; the decode kernels' traffic: test_decode.py.
BLOCKED = [
    row
    for row in NATIVE.kernel_table()
    if row["compiled"] and row["engine"] == "wgmma" and "blocked128" in row["w_layouts"]
]


@pytest.fixture
def counters(tmp_path: Path) -> Any:
    """Counts from here on; calling it gives the counters of the last launch."""
    if simulator.runtime is None:
        pytest.skip("a GPU has no such counters")
    path = tmp_path / "counters.json"
    simulator.runtime.ptxsim_config(b"PTXSIM_STATS", str(path).encode())
    yield lambda: json.loads(path.read_text())[-1]
    simulator.runtime.ptxsim_config(b"PTXSIM_STATS", None)


@pytest.mark.parametrize("row", BLOCKED, ids=lambda row: row["name"])
def test_blocked_weights_are_read_once_and_without_conflicts(
    native: Any, plain_device: Memory, counters: Any, row: dict[str, Any]
) -> None:
    tokens, channels, depth = row["tile"]
    m, n, k = tokens, 2 * channels, 3 * depth
    problem = {
        "m": m, "n": n, "k": k, "ldx": k, "ldw": k, "ldo": n, "x": "s8", "w": "s4", "out": "f16",
        "w_layout": "blocked128", "group_size": depth if row["groups_only"] else 0,
    }  # fmt: skip
    sizes = {"x": m * k, "w": native.blocked128_bytes(n, k), "out": 2 * m * n}
    sizes["workspace"] = native.workspace_bytes(row["name"], problem)
    operands = {name: plain_device.put(torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()}
    native.gemm(row["name"], problem, operands, {})
    assert not bool(plain_device.get(operands["out"], sizes["out"]).any())
    got = counters()
    assert got["wgmma_macs"] == m * n * k
    assert got["tma_load_bytes"] == n * k // 2 + n // channels * m * k
    assert got["shared"]["bank_conflict_factor"] == 1.0
    assert got["global_store"]["bytes"] == sizes["out"] or row["schedule"] == "swapped_streamk"  # partial sums
