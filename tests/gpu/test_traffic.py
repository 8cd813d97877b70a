"""What a launch moves, counted by the simulator: every block of blocked weights crosses the bus once, shared memory is
read without bank conflicts, nothing is multiplied in vain, and the epilogue of plain layers keeps its budget."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import simulator
import torch
from gpu_device import Memory
from images import as_images
from kernel_families import in_registers

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


def _blocked_bytes(native: Any, row: dict[str, Any], n: int, k: int) -> int:
    """Of whole blocks: half a byte a code, and of codes with steps a byte for 64."""
    return int(native.blocked128_bytes(n, k)) * (33 if row["steps_only"] else 32) // 32


def _experts(row: dict[str, Any]) -> dict[str, int]:
    """Of rows that take several: one."""
    return {"experts": int(row["experts_only"])}


def _ends(memory: Memory, row: dict[str, Any], m: int) -> dict[str, int]:
    return {"expert_ends": memory.put(torch.tensor([m], dtype=torch.int32))} if row["experts_only"] else {}


@pytest.mark.parametrize("row", BLOCKED, ids=lambda row: row["name"])
def test_blocked_weights_are_read_once_and_without_conflicts(
    native: Any, plain_device: Memory, counters: Any, row: dict[str, Any]
) -> None:
    tokens, channels, depth = row["tile"]
    m, n, k = tokens, 2 * channels, 3 * depth
    problem = {
        "m": m,
        "n": n,
        "k": k,
        "ldx": k,
        "ldw": k,
        "ldo": n,
        "x": "s8",
        "w": "s4",
        "out": "f16",
        "w_layout": "blocked128",
        "group_size": depth if row["groups_only"] else 0,
        "step_size": depth if row["steps_only"] else 0,
    }
    problem |= _experts(row)
    weights = _blocked_bytes(native, row, n, k)
    sizes = {"x": m * k, "w": weights, "out": 2 * m * n}
    sizes["workspace"] = native.workspace_bytes(row["name"], problem)
    operands = {name: plain_device.put(torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()}
    operands |= _ends(plain_device, row, m)
    native.gemm(row["name"], problem, operands, {})
    assert not bool(plain_device.get(operands["out"], sizes["out"]).any())
    got = counters()
    assert got["wgmma_macs"] == m * n * k
    assert got["tma_load_bytes"] == weights + n // channels * m * k
    assert got["shared"]["bank_conflict_factor"] == 1.0
    assert got["global_store"]["bytes"] == sizes["out"] or row["schedule"] == "swapped_streamk"  # partial sums


WEIGHT_ONLY = [
    row
    for row in NATIVE.kernel_table()
    if row["compiled"] and row["engine"] == "wgmma" and row["w_zero_point"]  # integer weights under floats
]


@pytest.mark.parametrize("row", WEIGHT_ONLY, ids=lambda row: row["name"])
def test_weights_under_floats_are_fetched_once_and_widened_without_conflicts(
    native: Any, plain_device: Memory, counters: Any, row: dict[str, Any]
) -> None:
    """Those widened in registers pass through shared memory once, and x reaches a cluster's blocks together. Others
    do so twice, as codes and as floats. The simulator sees what PTX says: codes are loaded word by word, of rows 64
    bytes apart, four of which lie in the same banks; ptxas joins a lane's words to 16 bytes (test_machine_code.py),
    whose pieces do not. Of the floats, stored 16 bytes at a time, none may collide."""
    (tokens, channels, depth), (_, together) = row["tile"], row["cluster"]
    m, n, k = tokens, 2 * channels, 3 * depth
    w = row["w"][0]
    problem = {"m": m, "n": n, "k": k, "ldx": k, "ldw": k, "ldo": n, "x": "bf16", "w": w, "out": "bf16"}
    problem |= {"group_size": depth, **_experts(row)}
    weights = n * k // (2 if w == "s4" else 1)
    sizes = {"x": 2 * m * k, "w": weights, "out": 2 * m * n, "w_scale": 4 * n * k // depth}
    sizes["workspace"] = native.workspace_bytes(row["name"], problem)
    operands: dict[str, Any] = {
        name: plain_device.put(torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items() if size
    }
    operands |= _ends(plain_device, row, m) | ({"expert_shifts": [0] * 4} if row["experts_only"] else {})
    native.gemm(row["name"], problem, operands, {})
    got = counters()
    assert got["wgmma_macs"] == m * n * k
    delivered = weights + n // channels * 2 * m * k
    assert got["tma_load_bytes"] == got["l2_to_sm"]["tma_delivered_bytes"] == delivered
    assert got["l2_to_sm"]["tma_bytes"] == weights + n // (channels * together) * 2 * m * k
    shared = got["shared"]
    assert shared["load_bytes"] == weights
    if in_registers(row):
        assert shared["store_bytes"] == 0
        assert shared["bank_conflict_factor"] == 1.0
        return
    assert shared["store_bytes"] == 2 * n * k
    assert 128 * shared["wavefronts"] <= shared["store_bytes"] + 4 * shared["load_bytes"]


# The one that has no room for it (csrc/cuda/gemm/store90.cuh) is left out.
WGMMA = [
    row
    for row in NATIVE.kernel_table()
    if row["compiled"] and row["engine"] == "wgmma" and not re.search("s8s4_(blocked|steps)_192x", row["name"])
]


def _cluster(row: dict[str, Any]) -> tuple[int, int, int]:
    (m, n, k), (blocks_m, blocks_n) = row["tile"], row["cluster"]
    return m * blocks_m, n * blocks_n, k


def _counted(
    native: Any,
    memory: Memory,
    counters: Any,
    row: dict[str, Any],
    out: str,
    zero_point: str = "",
    residual: str = "",
    short: int = 0,
    **epilogue: Any,
) -> Any:
    """The counters of one cluster of whole tiles: a block without outputs executes stores that store nothing.

    zero_point  '', 'scalar' or 'token'.
    residual    '' or its type.
    short       channels by which the last tile reaches over N.
    """
    m, n, k = _cluster(row)
    n -= short
    w, x = row["w"][0], "s8" if "s8" in row["x"] else row["x"][0]
    bits = {"s4": 4, "s8": 8}.get(w, 16)
    problem = {
        "m": m,
        "n": n,
        "k": k,
        "ldx": k,
        "ldw": k,
        "ldo": n,
        "x": x,
        "w": w,
        "out": out,
        "per_token_scale": True,
        "w_layout": "blocked128" if "blocked128" in row["w_layouts"] else "natural",
        "group_size": k if row["groups_only"] else 0,
        "step_size": k if row["steps_only"] else 0,
        "has_zero_point": bool(zero_point),
        "per_token_zero_point": zero_point == "token",
    }
    problem |= _experts(row)
    if residual:
        problem |= {"residual": residual, "ldr": n, "residual_align": 16}
    ones = {name: torch.ones(size) for name, size in (("x_scale", m), ("w_scale", n), ("bias", n), ("out_scale", 1))}
    blocked = problem["w_layout"] == "blocked128"
    zeros = {"x": m * k * (1 if x == "s8" else 2), "out": 4 * m * n}
    zeros["w"] = _blocked_bytes(native, row, n, k) if blocked else n * k * bits // 8
    zeros["workspace"] = native.workspace_bytes(row["name"], problem)
    zeros |= {"x_zero_point": 4 * m + 4, "w_sum": 4 * n} if zero_point else {}
    zeros |= {"residual": 4 * m * n} if residual else {}
    operands = {name: memory.put(torch.zeros(size, dtype=torch.uint8)) for name, size in zeros.items()}
    operands |= {name: memory.put(values) for name, values in ones.items()}
    operands |= _ends(memory, row, m)
    if zero_point:
        operands["x_zero_point"] += 4  # where a packed layer has it: behind the scale
    native.gemm(row["name"], problem, operands, epilogue)
    return counters()


@pytest.mark.parametrize("out", ["f16", "bf16", "s8"])
@pytest.mark.parametrize("row", WGMMA, ids=lambda row: row["name"])
def test_the_plain_epilogue_keeps_its_budget(
    native: Any, plain_device: Memory, counters: Any, row: dict[str, Any], out: str
) -> None:
    """Against the general form, which the same tile takes with a residual of float32."""
    if out not in row["out"]:
        pytest.skip("no such results")
    m, n, k = _cluster(row)
    got = _counted(native, plain_device, counters, row, out)
    general = _counted(native, plain_device, counters, row, out, residual="f32")
    # A store is 32 lanes of 16 bytes; swapped, a warp holds 16 tokens (codes: 32) at a time, the last of them in part.
    at_once = 1 if not row["schedule"].startswith("swapped") else 32 if out == "s8" else 16
    bytes_out = -(-m // at_once) * at_once * n * (1 if out == "s8" else 2)
    assert got["global_store"]["requests"] <= bytes_out // 512
    if out != "s8" or not row["schedule"].startswith("swapped"):
        assert got["global_store"]["efficiency"] == general["global_store"]["efficiency"] == 1.0
    classes = {name: 32 * count / (m * n) for name, count in got["classes"].items()}
    before = {name: 32 * count / (m * n) for name, count in general["classes"].items()}
    assert classes.get("cvt.frnd", 0) == classes.get("cvt.f2i", 0) == 0
    # One conversion for two values, half a tile of 8 tokens is padding; and one for two weights that are rounded.
    assert out == "s8" or classes["cvt.f2f"] <= 1 + row["rounds_weights"] * k / (2 * m)
    assert classes["shuffle"] <= before["shuffle"]  # movmatrix is a class of its own
    assert classes["st.global"] <= before["st.global"]


@pytest.mark.parametrize("out", ["bf16", "s8"])
@pytest.mark.parametrize(
    "row",
    [row for row in WGMMA if row["zero_point"] and not row["groups_only"] and "streamk" not in row["schedule"]],
    ids=lambda row: row["name"],
)  # whose warps do not wait in a loop for long
def test_a_zero_point_is_little_of_the_plain_epilogue(
    native: Any, plain_device: Memory, counters: Any, row: dict[str, Any], out: str
) -> None:
    """An operation a sum, and what is loaded. On an H200 the general epilogue, where launches with a zero point went,
    took a third of a large product's time."""
    if out not in row["out"]:
        pytest.skip("no such results")
    m, n, _ = _cluster(row)

    def executed(zero_point: str) -> float:
        classes = _counted(native, plain_device, counters, row, out, zero_point)["classes"]
        return 32 * (sum(classes.values()) - classes.get("mov", 0)) / (m * n)

    # Of a tile of 16 tokens half of the values are padding. Predicates of what may lie beyond N count in PTX.
    assert executed("scalar") <= executed("") + (5 if m <= 16 else 4)


# Of 8-bit activations. Those whose warps have 80 x 64 sums have no registers for it (csrc/cuda/gemm/sm80.cuh).
MMA = [
    row
    for row in NATIVE.kernel_table()
    if row["compiled"] and row["engine"] == "mma" and not row["experts_only"] and {"s8", "u8"} & {*row["x"]}
    if not re.search("(s8|u8)s8_160x", row["name"])
]
# Instructions that an output costs, moves apart: of the simulator's PTX, in which sums are exchanged, converted, scaled
# and stored by as many as in machine code.
MMA_PLAIN = {"f16": 9.0, "bf16": 9.0, "s8": 15.0}


@pytest.mark.parametrize("out", MMA_PLAIN)
@pytest.mark.parametrize("row", MMA, ids=lambda row: row["name"])
def test_the_plain_epilogue_of_mma_rows_keeps_its_budget(
    native: Any, plain_device: Memory, counters: Any, row: dict[str, Any], out: str
) -> None:
    """What more tokens of one tile cost, to which the main loop is all one: so are addresses and scales of the
    channels, once for each warp, which are less than one instruction an output of a whole tile."""
    m, n, k = row["tile"]
    if m == 16:
        pytest.skip("one tile has no more tokens than a warp stores at once")

    def counted(tokens: int) -> Any:
        scales = {"x_scale": tokens, "w_scale": n, "bias": n, "out_scale": 1}
        operands = {name: plain_device.put(torch.ones(size)) for name, size in scales.items()}
        zeros = {"x": m * k, "w": NATIVE.blocked128_bytes(n, k) + n * k, "out": 2 * m * n, "w_step": n * k}
        operands |= {name: plain_device.put(torch.zeros(size, dtype=torch.uint8)) for name, size in zeros.items()}
        problem = {"m": tokens, "n": n, "k": k, "ldx": k, "ldw": k, "ldo": n, "out": out, "per_token_scale": True}
        problem |= {"x": "s8" if "s8" in row["x"] else "u8", "w": row["w"][0], "w_layout": row["w_layouts"][0]}
        problem["group_size"] = k if row["groups_only"] else 0
        problem["step_size"] = k if row["steps_only"] else 0
        problem |= as_images(row, tokens, k)
        native.gemm(row["name"], problem, operands, {})
        return counters()

    whole, part = counted(m), counted(16)
    outputs = (m - 16) * n
    assert whole["global_store"]["efficiency"] == 1.0
    assert whole["global_store"]["requests"] == m * n * (1 if out == "s8" else 2) // 512
    classes = {name: 32 * (count - part["classes"].get(name, 0)) / outputs for name, count in whole["classes"].items()}
    assert classes.get("cvt.frnd", 0) == classes.get("cvt.f2i", 0) == 0
    assert sum(count for name, count in classes.items() if name != "mov") <= MMA_PLAIN[out]


# What an activation's own operations come to (csrc/core/activation_math.h), an output.
CURVES = {"gelu": 27, "gelu_tanh": 30, "silu": 26}


# What may follow a product's scales and bias -> instructions an output beside the plain epilogue, moves apart. A curve
# also pays for its turn in a loop; a residual's words are exchanged between lanes as those of results are; float32 is
# stored as it lies.
FOLLOWING: dict[str, tuple[dict[str, Any], float]] = {
    "relu": ({"activation": "relu"}, 2.5),
    "clamp": ({"activation": "clamp", "clamp_min": -1.0, "clamp_max": 1.0}, 8.0),
    **{name: ({"activation": name}, operations + 5.5) for name, operations in CURVES.items()},
    "residual bf16": ({"residual": "bf16"}, 5.0),
    "residual f16": ({"residual": "f16"}, 5.0),
    "to float32": ({"out": "f32"}, 2.0),
    "16 channels short": ({"short": 16}, 3.0),
}


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize(
    "row",
    [row for row in WGMMA if row["name"] == "gemm_sm90_s8s8_64x128x128_c1x1_pingpong"],
    ids=lambda row: row["name"],
)  # in every build; no warp of it waits in a loop for long
def test_what_follows_the_scales_costs_little_more_than_its_own_operations(
    native: Any, plain_device: Memory, counters: Any, row: dict[str, Any], following: str
) -> None:
    """On an H200 the general epilogue, where all of these went, took longer than the product that it finished."""
    m, n, _ = row["tile"]
    options, more = FOLLOWING[following]

    def executed(**options: Any) -> float:
        counted = _counted(native, plain_device, counters, row, **{"out": "bf16", **options})
        assert counted["global_store"]["efficiency"] == 1.0
        classes = counted["classes"]
        return 32 * (sum(classes.values()) - classes.get("mov", 0)) / (m * (n - options.get("short", 0)))

    plain, got = executed(), executed(**options)
    assert got <= plain + more, f"{got:.1f} an output, {plain:.1f} without"


# Those whose blocks of 128 channels share their activations.
SHARING = [
    row for row in NATIVE.kernel_table() if row["compiled"] and row["engine"] == "decode" and row["tile"][1] == 128
]


@pytest.mark.parametrize("row", SHARING, ids=lambda row: row["name"])
def test_decode_kernels_fetch_half_as_many_bytes_of_activations_as_of_weights(
    native: Any, plain_device: Memory, counters: Any, row: dict[str, Any]
) -> None:
    """At 16 tokens, and at 32 as many."""
    m, n, k = row["tile"][0], 256, 4096
    x, w, layout = row["x"][0], row["w"][0], row["w_layouts"][0]
    problem = {"m": m, "n": n, "k": k, "ldx": k, "ldw": k, "ldo": n, "x": x, "w": w, "out": "f32", "w_layout": layout}
    problem["step_size"] = 128 if row["steps_only"] else 0
    x_bytes, w_bytes = m * k * (2 if x in ("f16", "bf16") else 1), n * k // (2 if w == "s4" else 1)
    sizes = {"x": x_bytes, "w": w_bytes, "out": 4 * m * n, "workspace": native.workspace_bytes(row["name"], problem)}
    operands = {name: plain_device.put(torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items() if size}
    operands["w_scale"] = plain_device.put(torch.ones(n))
    if row["steps_only"]:
        blocks = _blocked_bytes(native, row, n, k)
        operands["w"] = plain_device.put(torch.zeros(blocks, dtype=torch.uint8))
        operands["w_step"] = plain_device.put(torch.ones(k // 128 * n, dtype=torch.uint8))
    native.gemm(row["name"], problem, operands, {})
    got = counters()
    fetched = got["l2_to_sm"]["cp_async_bytes"]
    assert fetched == x_bytes * n // 128
    assert fetched <= w_bytes * m / 32
