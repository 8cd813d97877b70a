"""The decode kernels beyond what every row is asked for: each M, K at the bound of int32, K shared by many blocks, and
the traffic that they are made for, counted by the simulator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accept
import pytest
import simulator
import torch
from gpu_device import SENTINEL, Memory
from problems import BASE_SEED, Draw
from steps import draw_steps, natural_steps, pack_blocked_steps, products
from torch import Tensor

from pyquant.numerics.gemm import gemm
from pyquant.numerics.pack import pack_int4

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
ROWS = {row["name"]: row for row in NATIVE.kernel_table() if row["compiled"] and row["engine"] == "decode"}
CODES = {"s8": (-128, 127), "s4": (-8, 7)}
STEP_SIZES = (192, 128, 96, 64, 32)  # codes that share a step, of which a case takes the first that divides its K
EIGHTHS = 0.125  # float activations are eighths: their sums are exact, whatever the order


@dataclass
class Case:
    """float32 out, a scale per channel (or group) and nothing else."""

    problem: dict[str, Any]
    memory: dict[str, Tensor]
    want: Tensor


def _case(name: str, m: int, n: int, k: int, group_size: int = 0, extreme: bool = False) -> Case:
    """Random codes; `extreme`: the largest ones."""
    row = ROWS[name]
    draw = Draw(BASE_SEED, "decode", name, m, n, k, group_size)
    x_type, w_type = row["x"][0], row["w"][0]
    real = x_type in ("f16", "bf16")
    x_range, w_range = CODES.get(x_type, (-16, 16)), CODES[w_type]
    x, w = draw.codes(*x_range, m, k).to(torch.int8), draw.codes(*w_range, n, k).to(torch.int8)
    if extreme:
        x.fill_(x_range[0])
        w.fill_(w_range[0])
    step_size = 0
    codes, step = w, None
    if row["steps_only"]:
        step_size = next(size for size in STEP_SIZES if k % size == 0 and size % row["step_multiple"] == 0)
        codes, step = draw_steps(draw, n, k, step_size)
        if extreme:
            codes.fill_(-7)
            step.fill_(18)
        w = products(codes, step)
    groups = k // group_size if group_size else 1
    scale = torch.exp2(draw.codes(-8, -5, n, groups).float()) if real else draw.normal(n, groups)
    scale = scale if group_size else scale[:, 0].contiguous()
    want = gemm(x, w, scale, torch.tensor(EIGHTHS) if real else None, group_size=group_size)
    x_memory = (x * EIGHTHS).to(torch.float16 if x_type == "f16" else torch.bfloat16) if real else x
    layout = row["w_layouts"][0]
    problem = {
        "m": m,
        "n": n,
        "k": k,
        "x": x_type,
        "w": w_type,
        "out": "f32",
        "ldx": k,
        "ldo": n,
        "group_size": group_size,
        "ldw": k if layout == "natural" else -(-k // 128) * 128,
        "w_layout": layout,
        "step_size": step_size,
    }
    memory = {"x": x_memory, "w_scale": scale}
    if step is None or layout == "natural":
        memory["w"] = _in_memory(codes, w_type, layout)
    else:
        memory["w"] = pack_blocked_steps(codes, step)[0]
    if step is not None:
        memory["w_step"] = natural_steps(step)
    return Case(problem, memory, want)


def _in_memory(w: Tensor, kind: str, layout: str) -> Tensor:
    """Weights as the kernel reads them."""
    packed = pack_int4(w) if kind == "s4" else w
    if layout == "natural":
        return packed
    n, k = w.shape
    blocked = torch.full((NATIVE.blocked128_bytes(n, k),), SENTINEL, dtype=torch.uint8)
    NATIVE.pack_blocked128(packed.data_ptr(), n, k, 2 * packed.shape[1], blocked.data_ptr(), device=None)
    return blocked


def _check(native: Any, device: Memory, name: str, case: Case, launches: int = 1) -> None:
    """Launches on the same workspace, which starts as junk; each result bit for bit."""
    operands = {key: device.put(tensor) for key, tensor in case.memory.items()}
    needed = native.workspace_bytes(name, case.problem)
    operands["workspace"] = device.put(torch.full((needed,), SENTINEL, dtype=torch.uint8)) if needed else 0
    size = 4 * case.want.numel()
    for _ in range(launches):
        operands["out"] = device.put(torch.full((size,), SENTINEL, dtype=torch.uint8))
        native.gemm(name, case.problem, operands, {})
        got = device.get(operands["out"], size).view(torch.float32).reshape(case.want.shape)
        accept.t1(got, case.want, what=f"{name} {case.problem}", waiver="a single launch may be nearly constant")
    device.free()


@pytest.mark.parametrize("name", ROWS)
def test_every_number_of_tokens(native: Any, plain_device: Memory, name: str) -> None:
    for m in range(1, (ROWS[name]["m_max"] or 48) + 1):
        _check(native, plain_device, name, _case(name, m, 40, 320 if ROWS[name]["step_multiple"] > 32 else 288))


@pytest.mark.parametrize("name", ROWS)
def test_k_that_many_blocks_share(native: Any, device: Memory, name: str) -> None:
    """K enough for every warp of eight blocks, one tile of channels, and a tail."""
    k = 28672 + max(ROWS[name]["k_multiple"], ROWS[name]["step_multiple"])
    case = _case(name, 3, 9, k)
    clusters = ROWS[name]["sm_min"] == 90  # they add through shared memory
    assert clusters or native.workspace_bytes(name, case.problem) > 0
    _check(native, device, name, case, launches=2)


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name]["zero_point"]])
def test_largest_sums_do_not_wrap(native: Any, plain_device: Memory, name: str) -> None:
    row = ROWS[name]
    step_size = row["step_multiple"] if row["steps_only"] else 0
    bound = native.k_bound({"x": row["x"][0], "w": row["w"][0], "step_size": step_size}) // row["acc_scale"]
    multiple = max(row["k_multiple"], step_size)
    k = bound // multiple * multiple
    case = _case(name, 1, 2, k, extreme=True)
    assert bool((case.want != 0).all())
    _check(native, plain_device, name, case)


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name]["group_multiple"]])
def test_group_scales_over_many_rounds(native: Any, device: Memory, name: str) -> None:
    for group_size, groups in ((64, 35), (128, 19), (320, 9)):
        _check(native, device, name, _case(name, 9, 33, group_size * groups, group_size))


@pytest.mark.skipif(simulator.runtime is None, reason="traffic is counted by the simulator")
@pytest.mark.parametrize("whole_tile", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_weights_are_read_once_and_banks_do_not_collide(
    native: Any, plain_device: Memory, tmp_path: Path, name: str, whole_tile: bool
) -> None:
    m, n, k = ROWS[name]["tile"][0] if whole_tile else 2, 256, 4096
    case = _case(name, m, n, k)
    file = tmp_path / "launches.json"
    assert simulator.runtime is not None
    simulator.runtime.ptxsim_config(b"PTXSIM_STATS", str(file).encode())
    try:
        _check(native, plain_device, name, case)
    finally:
        simulator.runtime.ptxsim_config(b"PTXSIM_STATS", None)
    launch = json.loads(file.read_text())[-1]
    x = case.memory["x"]
    needed = n * k // (2 if case.problem["w"] == "s4" else 1)
    needed += x.numel() * x.element_size() * n // ROWS[name]["tile"][1]  # once for every block of channels
    if ROWS[name]["steps_only"]:  # a byte for 64 codes, or a row of steps for every 128 that a lane takes, in sectors
        needed += n * k // (64 if case.problem["w_layout"] == "blocked128" else 128)
    # Beside weights and activations, of every block and output: the sum that another block reads, and a scale, whose
    # sectors two loads of every second channel touch.
    more = launch["grid"][0] * launch["grid"][2] * ROWS[name]["tile"][1] * (4 + 2 * 4) * m
    assert launch["global_load"]["efficiency"] >= 0.95
    assert needed <= 32 * launch["global_load"]["sectors"] <= needed + more
    assert launch["shared"]["bank_conflict_factor"] <= 1.05
