"""Products of so many tiles that persistent blocks take them in squares: every tile once, in its place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_device import SENTINEL, Memory
from problems import BASE_SEED, Draw

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
ROWS = {row["name"]: row for row in NATIVE.kernel_table() if row["compiled"] and row["family"] == "sm90_s8s8"}
K = 16


def sides(native: Any, row: dict[str, Any]) -> tuple[int, int]:
    """Tokens and channels of the smallest product whose tiles are taken several lines abreast."""
    (tile_m, tile_n, _), (cluster_m, cluster_n) = row["tile"], row["cluster"]
    m, n, at_once = tile_m * cluster_m, tile_n * cluster_n, native.device_info(0)["sm_count"] // (cluster_m * cluster_n)
    swapped = "swapped" in row["schedule"]

    def lines(tiles_m: int, tiles_n: int) -> int:
        grid = (tiles_n, tiles_m, n, m) if swapped else (tiles_m, tiles_n, m, n)
        return int(native.tile_swizzle(*grid, at_once))

    found = [(a * b, a, b) for a, b in itertools.product(range(4, 97, 4), repeat=2) if lines(a, b) > 1]
    _, tiles_m, tiles_n = min(found)
    return tiles_m * m, tiles_n * n


@pytest.mark.parametrize("name", ROWS)
def test_every_tile_is_computed_once(native: Any, plain_device: Memory, name: str) -> None:
    if native.device_info(0)["sm"] != 90:
        pytest.skip("rows for sm_90")
    m, n = sides(native, ROWS[name])
    draw = Draw(BASE_SEED, "swizzle", name)
    x, w = draw.codes(-127, 127, m, K).to(torch.int8), draw.codes(-127, 127, n, K).to(torch.int8)
    problem = {"m": m, "n": n, "k": K, "ldx": K, "ldw": K, "ldo": n, "x": "s8", "w": "s8", "out": "s32"}
    operands = {"x": plain_device.put(x), "w": plain_device.put(w)}
    operands["out"] = plain_device.put(torch.full((4 * m * n,), SENTINEL, dtype=torch.uint8))
    needed = native.workspace_bytes(name, problem)
    operands["workspace"] = plain_device.put(torch.full((needed,), SENTINEL, dtype=torch.uint8)) if needed else 0
    native.gemm(name, problem, operands, {})
    got = plain_device.get(operands["out"], 4 * m * n).view(torch.int32).reshape(m, n)
    assert torch.equal(got, (x.float() @ w.float().T).to(torch.int32))
