"""Launches one kernel of every family on a device and compares the result with the CPU's: that a library loads, holds
machine code for this chip and runs it is seen in seconds, before anything long is started."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CODES = {"s8": (-128, 128), "u8": (0, 256), "s4": (-8, 8)}
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}
M, N, K, GROUP = 5, 64, 256, 128
STEPS = 16  # of int4 codes that share one: 15 times -8 is an int8 code
EIGHTH = 0.125  # float operands are eighths: their sums are exact, whatever the order


@dataclass(frozen=True)
class Launched:
    """seconds of the first launch of a family's row, its code loaded; wrong: what was not as on the CPU, or None."""

    family: str
    row: str
    seconds: float
    wrong: str | None


def runnable(table: Sequence[Mapping[str, Any]], sm: int) -> list[Mapping[str, Any]]:
    """The rows that are made for a chip, compiled or not."""
    return [row for row in table if row["sm_min"] <= sm < row["sm_end"]]


def one_of_each_family(table: Sequence[Mapping[str, Any]], sm: int) -> list[Mapping[str, Any]]:
    """The first compiled row of each family that runs on a chip."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in runnable(table, sm):
        if row["compiled"]:
            first.setdefault(str(row["family"]), row)
    return list(first.values())


def probe(native: Any, device: torch.device, index: int = 0) -> Iterator[Launched]:
    """Launches one row of each family. device: where the operands lie; index: of the device that runs the row."""
    for row in one_of_each_family(native.kernel_table(), native.device_info(index)["sm"]):
        problem, operands, want = _case(native, row)
        there = {name: tensor.to(device) for name, tensor in operands.items()}
        out = torch.full((problem["m"], N), float("nan"), device=device)
        started = time.monotonic()
        try:
            got = _launch(native, row, problem, there | {"out": out}, device, index)
            wrong = None if torch.equal(got, want) else f"{int((got != want).sum())} of {want.numel()} numbers differ"
        except (RuntimeError, ValueError) as error:  # the device's own words
            wrong = str(error)
        yield Launched(str(row["family"]), str(row["name"]), time.monotonic() - started, wrong)


def _launch(
    native: Any,
    row: Mapping[str, Any],
    problem: dict[str, Any],
    tensors: dict[str, Tensor],
    device: torch.device,
    index: int,
) -> Tensor:
    needed = native.workspace_bytes(row["name"], problem, index)
    workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device=device)
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    pointers |= {"workspace": workspace.data_ptr()} if needed else {}
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    native.gemm(row["name"], problem, pointers, {}, index, stream)
    if on_gpu:
        torch.cuda.synchronize(device)
    return tensors["out"].cpu()


def _case(native: Any, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """float32 out, a scale per channel or group; in the words of the native interface, as tensors, and the result."""
    from pyquant.numerics.gemm import gemm
    from pyquant.ops.rows_layout import natural_steps

    draw = torch.Generator().manual_seed(1)
    x_type, w_type = row["x"][0], row["w"][0]
    m, group = min(M, row["m_max"] or M), GROUP if row["groups_only"] else 0
    packed = row["x_packing"] == "nibbles"
    x, w = _codes(x_type, m, draw), _codes(w_type, N, draw)
    step = torch.randint(1, STEPS, (N, K // GROUP), generator=draw).to(torch.uint8) if row["steps_only"] else None
    scale = torch.exp2(torch.randint(-3, 4, (N, K // (group or K)), generator=draw).float())
    scale = scale if group else scale[:, 0].contiguous()
    problem = {
        "m": m,
        "n": N,
        "k": K,
        "x": x_type,
        "w": w_type,
        "out": "f32",
        "ldx": K,
        "ldw": K,
        "ldo": N,
        "group_size": group,
        "x_packed": packed,
        "experts": 1 if row["experts_only"] else 0,
    }
    if row["channel_multiple"]:  # x as an image of m pixels under a window of one
        image = {"channels": K, "taps": 1, "out_height": 1, "out_width": m, "image_step": m * K}
        problem["image"] = image | {"window_step": [0, K], "tap_step": [0, 0]}
    operands = {"x": _in_memory(x, x_type, packed), "w_scale": scale}
    if row["experts_only"]:
        operands["expert_ends"] = torch.tensor([m], dtype=torch.int32)
    if "natural" in row["w_layouts"]:
        operands["w"] = _in_memory(w, w_type, w_type == "s4")
    else:
        operands["w"] = _blocked(native, w, step)
        problem["w_layout"] = "blocked128"
    if step is not None:
        problem["step_size"], operands["w_step"] = GROUP, natural_steps(step)
        w = w * step.to(torch.int8).repeat_interleave(GROUP, 1)
    eighths = EIGHTH ** ((x_type in FLOATS) + (w_type in FLOATS))
    return problem, operands, gemm(x, w, scale * eighths, group_size=group)


def _codes(kind: str, rows: int, draw: torch.Generator) -> Tensor:
    low, high = CODES.get(kind, (-16, 17))
    return torch.randint(low, high, (rows, K), generator=draw).to(torch.uint8 if kind == "u8" else torch.int8)


def _in_memory(codes: Tensor, kind: str, packed: bool) -> Tensor:
    from pyquant.numerics.pack import pack_int4

    if packed:
        return pack_int4(codes)
    return (codes * EIGHTH).to(FLOATS[kind]) if kind in FLOATS else codes


def _blocked(native: Any, codes: Tensor, step: Tensor | None) -> Tensor:
    from pyquant.numerics.pack import pack_int4
    from pyquant.ops import LinearSpec
    from pyquant.ops.rows_layout import BLOCK_BYTES, blocked_steps

    packed = pack_int4(codes)
    blocked = torch.zeros(native.blocked128_bytes(N, K), dtype=torch.uint8)
    native.pack_blocked128(packed.data_ptr(), N, K, K, blocked.data_ptr(), device=None)
    if step is not None:
        steps = blocked_steps(LinearSpec(N, K, w_bits=4, group_size=GROUP), step)
        blocked = torch.cat([blocked.view(-1, BLOCK_BYTES), steps], 1).view(-1)
    return blocked
