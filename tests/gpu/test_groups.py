"""The kernels made for group scales of int4 weights, beyond what every row is asked for: large groups, sums at the ends
of what their conversions take, many tiles, and the traffic of the mma.sync ones, counted by the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accept
import pytest
import simulator
import torch
from blocked import pack_blocked128
from gpu_device import SENTINEL, Memory
from problems import BASE_SEED, Draw
from torch import Tensor

from pyquant.numerics.gemm import gemm
from pyquant.numerics.pack import pack_int4

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
ROWS = {row["name"]: row for row in NATIVE.kernel_table() if row["compiled"] and row["groups_only"]}
NATURAL = [name for name, row in ROWS.items() if "natural" in row["w_layouts"]]
# A small tile of each family, where the size of a problem comes from K.
SMALLEST = list({row["family"]: name for name, row in sorted(ROWS.items(), key=lambda r: -r[1]["tile"][0])}.values())


def _check(
    native: Any,
    device: Memory,
    name: str,
    x: Tensor,
    w: Tensor,
    group_size: int,
    zero_point: int = 0,
    scale: Tensor | None = None,
) -> None:
    """float32 out with random scales, unless there are others: each result bit for bit."""
    (m, k), n = x.shape, len(w)
    groups = k // group_size
    if scale is None:
        scale = torch.exp2(Draw(BASE_SEED, "groups", name, m, n, k).normal(n, groups)) / 1000
    blocked = "blocked128" in ROWS[name]["w_layouts"]
    weights, order = pack_blocked128(w) if blocked else (pack_int4(w), {"ldw": k})
    problem = order | {
        "m": m,
        "n": n,
        "k": k,
        "x": "s8",
        "w": "s4",
        "out": "f32",
        "ldx": k,
        "ldo": n,
        "group_size": group_size,
        "has_zero_point": zero_point != 0,
        "out_align": min(16, 4 * n & -4 * n),
        "experts": int(ROWS[name]["experts_only"]),
    }
    operands = {"x": device.put(x), "w": device.put(weights), "w_scale": device.put(scale)}
    if ROWS[name]["experts_only"]:
        operands["expert_ends"] = device.put(torch.tensor([m], dtype=torch.int32))
    call: dict[str, Any] = {"group_size": group_size}
    if zero_point:
        call["x_zero_point"] = torch.tensor(zero_point, dtype=torch.int32)
        operands["x_zero_point"] = device.put(call["x_zero_point"].reshape(1))
        operands["w_sum"] = device.put(w.to(torch.int32).reshape(n, groups, -1).sum(-1, dtype=torch.int32))
    operands["out"] = device.put(torch.full((4 * m * n,), SENTINEL, dtype=torch.uint8))
    native.gemm(name, problem, operands, {})
    got = device.get(operands["out"], 4 * m * n).view(torch.float32).reshape(m, n)
    accept.t1(got, gemm(x, w, scale, **call), what=f"{name} {problem}", waiver="equal codes give few values")
    device.free()


def _codes(draw: Draw, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    return draw.codes(-128, 127, m, k).to(torch.int8), draw.codes(-8, 7, n, k).to(torch.int8)


@pytest.mark.parametrize("name", ROWS)
def test_groups_of_every_size(native: Any, plain_device: Memory, name: str) -> None:
    """Above 256 codes another conversion serves; groups begin and end anywhere in a stage of 128 codes."""
    for group_size, groups in ((64, 5), (128, 3), (192, 3), (256, 2), (320, 2), (640, 1)):
        for zero_point in (0, -101):
            x, w = _codes(Draw(BASE_SEED, "group sizes", name, group_size), 11, 37, group_size * groups)
            _check(native, plain_device, name, x, w, group_size, zero_point)


@pytest.mark.parametrize("name", ROWS)
def test_many_groups_with_scales_of_any_size(native: Any, plain_device: Memory, name: str) -> None:
    """Scales are fetched several groups ahead. A factor of 16 goes into those that float32 can divide by it: beside
    them stand subnormal ones and others whose sixteenth would be, 0, infinity and NaN, each in a channel of its own."""
    step = ROWS[name]["group_multiple"]
    for group_size, groups, zero_point in ((step, 13, 0), (128, 10, 77), (step, 14, 0), (128, 9, 0)):
        draw = Draw(BASE_SEED, "many groups", name, group_size, groups)
        x, w = _codes(draw, 19, 43, group_size * groups)
        scale = torch.exp2(draw.normal(43, groups))
        for channel, exponent in ((1, -149), (12, -140), (20, -126), (23, -123), (24, -122), (33, -121)):
            scale[channel] *= 2.0**exponent
        scale[5, 7], scale[39, groups - 1], scale[36, 3] = 0, float("inf"), float("nan")
        _check(native, plain_device, name, x, w, group_size, zero_point, scale)


@pytest.mark.parametrize("out", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", ROWS)
def test_one_scale_of_all_tokens(native: Any, plain_device: Memory, name: str, out: str) -> None:
    """A static layer's: it is multiplied after the groups are added up, and is one number, not one a token."""
    m, n, k, group_size = 21, 48, 256, 128
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[out]
    x, w = _codes(Draw(BASE_SEED, "one scale", name), m, n, k)
    scale, one = Draw(BASE_SEED, "one scale", name, "w").uniform(n, k // group_size) + 0.1, torch.tensor(0.003)
    blocked = "blocked128" in ROWS[name]["w_layouts"]
    weights, order = pack_blocked128(w) if blocked else (pack_int4(w), {"ldw": k})
    problem = order | {"m": m, "n": n, "k": k, "x": "s8", "w": "s4", "out": out, "ldx": k, "ldo": n, "out_align": 16}
    operands = {"x": plain_device.put(x), "w": plain_device.put(weights), "w_scale": plain_device.put(scale)}
    operands["x_scale"] = plain_device.put(one.reshape(1))
    if ROWS[name]["experts_only"]:
        problem["experts"], operands["expert_ends"] = 1, plain_device.put(torch.tensor([m], dtype=torch.int32))
    operands["out"] = plain_device.put(torch.full((dtype.itemsize * m * n,), SENTINEL, dtype=torch.uint8))
    native.gemm(name, problem | {"group_size": group_size}, operands, {})
    got = plain_device.get(operands["out"], dtype.itemsize * m * n).view(dtype).reshape(m, n)
    accept.t1(got, gemm(x, w, scale, one, group_size=group_size, out_dtype=dtype), what=f"{name} {out}")
    plain_device.free()


@pytest.mark.parametrize("name", ROWS)
def test_tiles_in_every_place(native: Any, plain_device: Memory, name: str) -> None:
    """More than eight rows of tiles, the width of a band, in two columns; the last ones not full."""
    tile_m, tile_n, _ = ROWS[name]["tile"]
    step = ROWS[name]["group_multiple"]
    x, w = _codes(Draw(BASE_SEED, "tiles", name), 9 * tile_m + 3, tile_n + 5, 2 * step)
    _check(native, plain_device, name, x, w, step)


@pytest.mark.parametrize("name", SMALLEST)
@pytest.mark.parametrize(("x", "w", "zero_point"), [(-128, -8, 0), (-128, 7, 0), (127, -8, -128), (-128, -8, 127)])
def test_extreme_codes_stay_exact(
    native: Any, plain_device: Memory, name: str, x: int, w: int, zero_point: int
) -> None:
    """256 equal codes reach the last float that a conversion by bits holds, and K the end of int32."""
    bound = native.k_bound({"x": "s8", "w": "s4", "has_zero_point": zero_point != 0}) // ROWS[name]["acc_scale"]
    for group_size, groups in ((256, 2), (320, 1), (bound // 64 * 64, 1)):
        k = group_size * groups
        codes = torch.full((2, k), x, dtype=torch.int8), torch.full((3, k), w, dtype=torch.int8)
        _check(native, plain_device, name, *codes, group_size, zero_point)


@pytest.mark.skipif(simulator.runtime is None, reason="traffic is counted by the simulator")
@pytest.mark.parametrize("name", NATURAL)
def test_each_tile_is_read_once_and_banks_do_not_collide(
    native: Any, plain_device: Memory, tmp_path: Path, name: str
) -> None:
    tile_m, tile_n, tile_k = ROWS[name]["tile"]
    m, n, k = tile_m, 2 * tile_n, 3 * tile_k
    x, w = _codes(Draw(BASE_SEED, "group traffic", name), m, n, k)
    file = tmp_path / "launches.json"
    assert simulator.runtime is not None
    simulator.runtime.ptxsim_config(b"PTXSIM_STATS", str(file).encode())
    try:
        _check(native, plain_device, name, x, w, 128)
    finally:
        simulator.runtime.ptxsim_config(b"PTXSIM_STATS", None)
    launch = json.loads(file.read_text())[-1]
    assert launch["mma_macs"] == m * n * k
    assert launch["cp_async_bytes"] == n * k // 2 + n // tile_n * m * k
    assert launch["shared"]["bank_conflict_factor"] == 1.0
    assert launch["global_store"]["bytes"] == 4 * m * n
