"""Integer weights under 16-bit activations for many tokens, of real numbers: within the stated bound of float64, the
same bits in every mode of the simulator, and a token's result whatever tokens come with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import accept
import pytest
import torch
from gpu_device import MODES, SENTINEL, Memory
from problems import BASE_SEED, Draw
from sample import some
from torch import Tensor

from pyquant.numerics.pack import pack_int4

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
SM = NATIVE.device_info(0)["sm"] if NATIVE.device_count() else 80  # without a device every test is skipped
FAMILIES = ("sm80_w4a16", "sm80_w8a16", "sm90_w4a16", "sm90_w8a16", "sm90_w4a16_rounded", "sm90_w8a16_rounded")
ROWS = {row["name"]: row for row in NATIVE.kernel_table() if row["compiled"] and row["family"] in FAMILIES}
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Layer:
    x: Tensor  # [m, k]
    codes: Tensor  # [n, k]
    scale: Tensor  # [n, groups]
    zero_point: Tensor | None  # [n, groups]
    group_size: int
    rounds: bool = False  # whether the row multiplies rounded weights, where scales are those of groups

    @property
    def steps(self) -> int:
        """Roundings a product: docs/numerics.md 8."""
        return 1 if self.rounds else 2

    def weights(self) -> Tensor:
        """What the row multiplies with, in float64: dequantised, or that rounded as docs/numerics.md 2.3 says."""
        groups = self.scale.shape[1]
        codes = self.codes.double().unflatten(1, (groups, -1))
        shifted = codes if self.zero_point is None else codes - self.zero_point.double()[..., None]
        if self.rounds and groups > 1:
            rounded = (shifted.float() * self.scale[..., None]).to(self.x.dtype)
            return rounded.double().flatten(1)
        return (shifted * self.scale.double()[..., None]).flatten(1)


def draw(name: str, dtype: str, m: int, n: int, k: int, group_size: int, affine: bool) -> Layer:
    d = Draw(BASE_SEED, "weight only", name, dtype, m, n, k, group_size)
    low, high = (-8, 7) if "w4" in name else (-128, 127)
    groups = k // group_size if group_size else 1
    return Layer(
        d.normal(m, k).to(FLOATS[dtype]),
        d.codes(low, high, n, k).to(torch.int8),
        d.uniform(n, groups) * 0.01 + 0.001,
        d.codes(low, high, n, groups).to(torch.int32) if affine else None,
        group_size,
        ROWS[name]["rounds_weights"],
    )


def run(
    native: Any,
    device: Memory,
    name: str,
    layer: Layer,
    out: str,
    more: dict[str, Tensor] | None = None,
    **epilogue: Any,
) -> Tensor:
    """more: operands of the epilogue; a residual is float32."""
    (m, k), n = layer.x.shape, len(layer.codes)
    w = ROWS[name]["w"][0]
    kind = next(text for text, dtype in FLOATS.items() if dtype == layer.x.dtype)
    problem: dict[str, Any] = {"m": m, "n": n, "k": k, "ldx": k, "ldw": k, "ldo": n, "x": kind, "w": w, "out": out}
    problem |= {"group_size": layer.group_size, "has_w_zero_point": layer.zero_point is not None, "out_align": 4}
    memory = {"x": layer.x, "w": pack_int4(layer.codes) if w == "s4" else layer.codes, "w_scale": layer.scale}
    memory |= {} if layer.zero_point is None else {"w_zero_point": layer.zero_point}
    memory |= more or {}
    problem |= {"residual": "f32", "ldr": n, "residual_align": 4} if "residual" in memory else {}
    operands: dict[str, Any] = {key: device.put(tensor) for key, tensor in memory.items()}
    dtype = torch.float32 if out == "f32" else FLOATS[out]
    operands["out"] = device.put(torch.full((m * n * dtype.itemsize,), SENTINEL, dtype=torch.uint8))
    needed = native.workspace_bytes(name, problem)
    operands["workspace"] = device.put(torch.full((needed,), SENTINEL, dtype=torch.uint8)) if needed else 0
    native.gemm(name, problem, operands, epilogue)
    got = device.get(operands["out"], m * n * dtype.itemsize).view(dtype).reshape(m, n)
    device.free()
    return got


def skip_unless_it_runs(name: str) -> None:
    if not ROWS[name]["sm_min"] <= SM < ROWS[name]["sm_end"]:
        pytest.skip("for another chip")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("group_size", "affine"), [(0, False), (0, True), (32, True), (64, False), (128, True)])
@pytest.mark.parametrize("name", ROWS)
def test_real_numbers_stay_within_the_bound(
    native: Any, plain_device: Memory, name: str, group_size: int, affine: bool, dtype: str
) -> None:
    skip_unless_it_runs(name)
    layer = draw(name, dtype, 70, 100, 384, group_size, affine)
    w, x = layer.weights(), layer.x.double()
    exact, magnitude = x @ w.T, x.abs() @ w.abs().T
    torchs = layer.x @ w.to(layer.x.dtype).T
    accept.t3(run(native, plain_device, name, layer, "f32"), exact, magnitude, 384, torchs, c=layer.steps, what="f32")
    accept.t3(run(native, plain_device, name, layer, dtype), exact, magnitude, 384, torchs, c=layer.steps, what=dtype)


@pytest.mark.parametrize("n", [100, 256])
@pytest.mark.parametrize("name", ROWS)
def test_what_follows_the_sum_is_that_of_every_layer(native: Any, plain_device: Memory, name: str, n: int) -> None:
    """Bias, activation and residual of a whole tile of the largest rows and of tails, beside torch's from the sum."""
    skip_unless_it_runs(name)
    layer = draw(name, "bf16", 270, n, 256, 128, True)
    d = Draw(BASE_SEED, "epilogue", name, n)
    bias, residual = d.normal(n), d.normal(270, n)
    plain = run(native, plain_device, name, layer, "f32")
    more = {"bias": bias, "residual": residual}
    got = run(native, plain_device, name, layer, "f32", more, activation="relu")
    assert torch.equal(got, (plain + bias).relu() + residual)
    assert torch.equal(run(native, plain_device, name, layer, "bf16", {"bias": bias}), (plain + bias).bfloat16())


@pytest.mark.parametrize("name", ROWS)
def test_bits_depend_on_neither_timing_nor_neighbours(native: Any, plain_device: Memory, name: str) -> None:
    """Modes of the simulator differ in the order of warps and copies; tokens alone, in front and in the middle, where K
    is not divided."""
    skip_unless_it_runs(name)
    layer = draw(name, "bf16", 150, 72, 256, 64, True)
    want = run(native, plain_device, name, layer, "f32")
    if plain_device.is_simulator:
        for mode in MODES:
            plain_device.mode(mode)
            assert torch.equal(run(native, plain_device, name, layer, "f32"), want), mode
        plain_device.mode("plain")
    for first, last in ((0, 1), (77, 78), (33, 140)):
        part = replace(layer, x=layer.x[first:last])
        assert torch.equal(run(native, plain_device, name, part, "f32"), want[first:last]), (first, last)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", ROWS)
def test_divided_sums_are_within_the_bound_and_the_same_in_every_order_of_blocks(
    native: Any, plain_device: Memory, name: str, steps: int
) -> None:
    """One tile and 33 steps of K, which many blocks share; their shares end inside of groups, of so many steps."""
    skip_unless_it_runs(name)
    k, group_size = ROWS[name]["tile"][2] * 33, ROWS[name]["tile"][2] * steps
    layer = draw(name, "f16", 21, 50, k, group_size, True)
    sizes = {"m": 21, "n": 50, "k": k, "group_size": group_size, "x": "f16", "w": ROWS[name]["w"][0], "out": "f32"}
    assert native.workspace_bytes(name, sizes | {"ldx": k, "ldw": k, "ldo": 50}) > 0
    results = []
    for mode in MODES if plain_device.is_simulator else ("plain", "plain", "plain"):
        plain_device.mode(mode)
        results.append(run(native, plain_device, name, layer, "f32"))
    plain_device.mode("plain")
    assert all(torch.equal(result, results[0]) for result in results)
    w, x = layer.weights(), layer.x.double()
    accept.t3(results[0], x @ w.T, x.abs() @ w.abs().T, k, layer.x @ w.half().T, c=layer.steps, what="divided")


@pytest.mark.parametrize("name", ROWS)
def test_what_lies_behind_k_and_in_other_rows_is_not_read_into_a_sum(
    native: Any, plain_device: Memory, name: str
) -> None:
    """Rows further apart than K, with NaN between them; tokens and channels that end inside of a tile."""
    skip_unless_it_runs(name)
    layer = draw(name, "f16", 19, 40, 96, 32, False)
    wide = torch.full((19, 160), torch.nan, dtype=torch.float16)
    wide[:, :96] = layer.x
    w = ROWS[name]["w"][0]
    codes = torch.full((40, 160), -1, dtype=torch.int8)
    codes[:, :96] = layer.codes
    problem = {"m": 19, "n": 40, "k": 96, "ldx": 160, "ldw": 160, "ldo": 40, "x": "f16", "w": w, "out": "f32"}
    memory = {"x": wide, "w": pack_int4(codes) if w == "s4" else codes, "w_scale": layer.scale}
    operands: dict[str, Any] = {key: plain_device.put(tensor) for key, tensor in memory.items()}
    operands["out"] = plain_device.put(torch.full((4 * 19 * 40,), SENTINEL, dtype=torch.uint8))
    native.gemm(name, problem | {"group_size": 32}, operands, {})
    got = plain_device.get(operands["out"], 4 * 19 * 40).view(torch.float32).reshape(19, 40)
    assert torch.equal(got, run(native, plain_device, name, layer, "f32"))


@pytest.mark.parametrize("name", ROWS)
def test_blocks_that_take_several_tiles_carry_their_buffers_on(native: Any, plain_device: Memory, name: str) -> None:
    """More tiles than multiprocessors, of three steps: buffers and their phases go on from tile to tile."""
    skip_unless_it_runs(name)
    row = ROWS[name]
    (_, channels, depth), (_, together) = row["tile"], row["cluster"]
    tiles = native.device_info(0)["sm_count"] // together + 5
    layer = draw(name, "bf16", 3, tiles * channels * together - 40, 3 * depth, 64, True)
    w, x = layer.weights(), layer.x.double()
    got = run(native, plain_device, name, layer, "f32")
    for mode in some(list(MODES), 2, name) if plain_device.is_simulator else ():
        plain_device.mode(mode)
        assert torch.equal(run(native, plain_device, name, layer, "f32"), got), mode
    plain_device.mode("plain")
    accept.t3(got, x @ w.T, x.abs() @ w.abs().T, 3 * depth, layer.x @ w.bfloat16().T, c=layer.steps, what=name)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [0, 32, 64, 96, 192])
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row["rounds_weights"]])
def test_rounded_weights_are_those_of_dequantize_to_the_bit(
    native: Any, plain_device: Memory, name: str, group_size: int, dtype: str
) -> None:
    """One code of K at a time is multiplied, by one; scales from where float16 has no normal numbers to where codes
    nearly leave it."""
    skip_unless_it_runs(name)
    layer = draw(name, dtype, 192, 70, 192, group_size, True)
    d = Draw(BASE_SEED, "magnitudes", name, group_size)
    layer.scale *= torch.exp2(d.uniform(*layer.scale.shape) * 28 - 18)
    layer.x = torch.eye(192, dtype=FLOATS[dtype])
    got = run(native, plain_device, name, layer, "f32")
    assert torch.equal(got, layer.weights().float().T)  # a scale a channel: rounded once, behind the sum
