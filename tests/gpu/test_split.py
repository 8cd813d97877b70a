"""Kernels that divide K between blocks (stream-K): shapes small enough that every tile is divided, junk in the
workspace, and a result that depends on no timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocked import pack_blocked128
from gpu_device import MODES, SENTINEL, Memory
from images import as_images
from problems import BASE_SEED, Draw
from steps import pack_blocked_steps, products
from torch import Tensor

from pyquant.numerics.pack import pack_int4

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
SM = NATIVE.device_info(0)["sm"] if NATIVE.device_count() else 80  # without a device every test is skipped
ROWS = {
    r["name"]: r
    for r in NATIVE.kernel_table()
    if r["compiled"] and r["schedule"].endswith(("streamk", "splitk")) and r["sm_min"] <= SM < r["sm_end"]
}
INTEGER = [name for name, row in ROWS.items() if "s32" in row["out"]]
FLOAT = [name for name, row in ROWS.items() if row["w"][0] in ("f16", "bf16")]  # integer weights: test_weight_only.py
# A block of stream-K takes 8 steps of K at least: 18 steps are two blocks a tile, 33 are four, and three tiles of 20
# share seven. Shares of `splitk` are as many as pay, which wants steps of 128 codes.
DEPTHS = ((1, 18), (3, 20), (1, 33))
STEP_SIZE = 64  # codes that share a step
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}


def _steps(w: Tensor) -> Tensor:
    """Steps for weights of full range, no two neighbours alike."""
    n, k = w.shape
    return (torch.arange(n)[:, None] * 4 + torch.arange(k // STEP_SIZE) * 7).remainder(15).add(1).to(torch.uint8)


def _multiplied(name: str, w: Tensor) -> Tensor:
    """What a row multiplies: codes, or codes times steps."""
    return products(w, _steps(w)) if ROWS[name]["steps_only"] else w


def _launch(native: Any, device: Memory, name: str, x: Tensor, w: Tensor, out: torch.dtype, **more: int) -> Tensor:
    """x @ w.T of codes or floats; asserts that K was divided: partial sums passed through the workspace."""
    (m, k), n, pitch = x.shape, len(w), -(-len(w) // 4) * 4
    problem: dict[str, Any] = {
        "m": m,
        "n": n,
        "k": k,
        "ldx": k,
        "ldw": k,
        "ldo": pitch,
        "x": ROWS[name]["x"][-1],
        "w": ROWS[name]["w"][0],
        "out": "s32" if out == torch.int32 else "f32",
    }
    problem |= as_images(ROWS[name], m, k)
    codes, weights = x, w
    if problem["x"] == "s4" and ROWS[name]["x_packing"] == "nibbles":
        codes = pack_int4(x)
        problem["x_packed"] = True
    if ROWS[name]["steps_only"]:
        weights, order = pack_blocked_steps(w, _steps(w))
        problem |= order | {"step_size": STEP_SIZE}
    elif "blocked128" in ROWS[name]["w_layouts"]:
        weights, order = pack_blocked128(w)
        problem |= order
    elif problem["w"] == "s4":
        weights = pack_int4(torch.nn.functional.pad(w, (0, -k % 32)))
        problem["ldw"] = k + -k % 32
    operands = {
        "x": device.put(codes),
        "w": device.put(weights),
        "out": device.put(torch.full((m * pitch * 4,), SENTINEL, dtype=torch.uint8)),
    }
    if "zero_point" in more:
        problem["has_zero_point"] = True
        operands["x_zero_point"] = device.put(torch.tensor([more["zero_point"]], dtype=torch.int32))
        operands["w_sum"] = device.put(_multiplied(name, w).sum(-1, dtype=torch.int32))
    needed = native.workspace_bytes(name, problem)
    assert needed > 0, f"{name} {problem}: K is not divided"
    workspace = device.put(torch.full((needed,), SENTINEL, dtype=torch.uint8))
    native.gemm(name, problem, operands | {"workspace": workspace}, {})
    got = device.get(operands["out"], m * pitch * 4).view(out).reshape(m, pitch)
    assert not torch.equal(device.get(workspace, needed), torch.full((needed,), SENTINEL, dtype=torch.uint8))
    return got[:, :n].clone()


def _sizes(name: str, tiles: int, steps: int) -> tuple[int, int, int]:
    """Sizes off the tile on every side, of so many tiles and steps of K."""
    tile_m, tile_n, tile_k = ROWS[name]["tile"]
    if ROWS[name]["schedule"] == "splitk":
        tile_k = max(tile_k, 128)
    off = max(16, ROWS[name]["k_multiple"], ROWS[name]["step_multiple"])
    return tile_m - 3, tiles * tile_n - 5, steps * tile_k - off


def _activations(name: str) -> tuple[int, int, torch.dtype]:
    """Lowest and highest code and type of a row's activations; s4, one to a byte, are s8 codes to the kernel."""
    if ROWS[name]["x_packing"] == "nibbles":
        return -8, 7, torch.int8
    return (0, 255, torch.uint8) if ROWS[name]["x"] == ["u8"] else (-128, 127, torch.int8)


@pytest.mark.parametrize("name", INTEGER)
def test_divided_sums_are_exact(native: Any, device: Memory, name: str) -> None:
    for tiles, steps in DEPTHS:
        m, n, k = _sizes(name, tiles, steps)
        draw = Draw(BASE_SEED, "split", name, steps)
        low, high = (-8, 7) if "s4" in ROWS[name]["w"] else (-128, 127)
        x_low, x_high, x_type = _activations(name)
        x, w = draw.codes(x_low, x_high, m, k).to(x_type), draw.codes(low, high, n, k).to(torch.int8)
        got = _launch(native, device, name, x, w, torch.int32, zero_point=x_low // 2)
        want = (x.double() - x_low // 2) @ _multiplied(name, w).double().T  # below 2^53: exact
        assert torch.equal(got.double(), want), f"{name} {m}x{n}x{k}"
        device.free()


# Natural int4 weights come to the ends of int32 at K = 2097151 only: too long for a simulator.
@pytest.mark.parametrize("name", [name for name in INTEGER if "s8" in ROWS[name]["w"] or ROWS[name]["acc_scale"] > 1])
@pytest.mark.parametrize(("k", "zero_point"), [(131056, 0), (65792, 127)])
def test_divided_sums_reach_the_ends_of_int32(
    native: Any, plain_device: Memory, name: str, k: int, zero_point: int
) -> None:
    at, _, x_type = _activations(name)
    if x_type == torch.uint8:
        at, k, zero_point = 255, 65792, 0
    x = torch.full((2, k), at, dtype=x_type)
    low, high = (-8, 7) if "s4" in ROWS[name]["w"] else (-128, 127)
    w = torch.full((3, k), low, dtype=torch.int8)
    w[1] = high
    more = {"zero_point": zero_point} if zero_point else {}
    got = _launch(native, plain_device, name, x, w, torch.int32, **more)
    want = (at - zero_point) * k * torch.tensor([low, high, low])
    assert want.abs().max() * ROWS[name]["acc_scale"] >= 2**31 - 2**18
    assert torch.equal(got.long(), want.expand(2, 3))


@pytest.mark.parametrize("name", FLOAT)
def test_divided_float_sums_are_right_and_the_same_in_every_order_of_blocks(
    native: Any, plain_device: Memory, name: str
) -> None:
    """Random floats, whose sum depends on the order of addition."""
    dtype = FLOATS[ROWS[name]["x"][0]]
    m, n, k = _sizes(name, 1, 33)
    draw = Draw(BASE_SEED, "split", name)
    x, w = draw.normal(m, k).to(dtype), draw.normal(n, k).to(dtype)
    results = []
    try:
        for mode in MODES if plain_device.is_simulator else ("plain", "plain", "plain"):
            plain_device.mode(mode)
            results.append(_launch(native, plain_device, name, x, w, torch.float32))
    finally:
        plain_device.mode("plain")
    want, magnitude = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    assert bool(((results[0].double() - want).abs() <= magnitude * k * 2.0**-24).all())
    assert all(torch.equal(result, results[0]) for result in results)
