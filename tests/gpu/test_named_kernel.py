"""ops.gemm(..., kernel=NAME): every compiled row of two integers or two floats, by its name, through torch."""

from __future__ import annotations

from typing import Any

import accept
import problems
import pytest
import torch
from cuda_ops import CudaOps
from torch import Tensor

from pyquant import ops
from pyquant.errors import ArgumentError, UnsupportedError

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
SM = NATIVE.device_info(0)["sm"] if NATIVE.device_count() else 80
CODES = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7)}
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}
ROWS = {
    row["name"]: row
    for row in NATIVE.kernel_table()
    if row["compiled"]
    and row["sm_min"] <= SM < row["sm_end"]
    and not row["groups_only"]
    and not row["steps_only"]  # of layers alone: a product of tensors has no steps
    and not row["experts_only"]  # nor experts
    and not row["channel_multiple"]  # nor images
    and (row["x"][0] in FLOATS) == (row["w"][0] in FLOATS)
}
M, N, K = 37, 72, 160


@pytest.fixture
def device(there: CudaOps) -> CudaOps:
    return there


def operands(row: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    draw = problems.Draw(problems.BASE_SEED, "named", row["name"])
    x_type, w_type = row["x"][0], row["w"][0]
    m = min(M, row["m_max"] or M)
    if x_type in FLOATS:  # eighths: their sums are exact, whatever the order
        x, w = (draw.codes(-16, 16, rows, K).to(FLOATS[x_type]) / 8 for rows in (m, N))
        return x, w, {"bias": draw.normal(N)}
    x = draw.codes(*CODES[x_type], m, K).to(torch.uint8 if x_type == "u8" else torch.int8)
    w = draw.codes(*CODES[w_type], N, K).to(torch.int8)
    x = ops.pack_int4(x) if x_type == "s4" and row["x_packing"] == "nibbles" else x
    w = ops.pack_int4(w) if w_type == "s4" else w
    return x, w, {"w_scale": problems.scales(draw, N), "x_scale": problems.scales(draw, m), "bias": draw.normal(N)}


@pytest.mark.parametrize("name", ROWS)
def test_the_named_row_runs_and_gives_the_bits(device: CudaOps, name: str) -> None:
    x, w, call = operands(ROWS[name])
    want = ops.gemm(x, w, **call)
    if x.dtype in FLOATS.values():
        want = (x.double() @ w.double().t()).float() + call["bias"]
    accept.t1(device.gemm(x, w, **call, kernel=name), want, what=name)
    accept.t1(device.gemm(x, w, **call).float(), want, what=f"{name}: as the plan chooses")


def test_a_row_that_cannot_says_why(device: CudaOps) -> None:
    integers = [n for n, row in ROWS.items() if row["x"][0] == "s8" and row["w"][0] == "s8" and row["k_multiple"] == 16]
    if not integers:
        pytest.skip("no s8 x s8 row of mma.sync is compiled into this build")
    x, w = torch.ones(2, 40, dtype=torch.int8), torch.ones(8, 40, dtype=torch.int8)
    with pytest.raises(UnsupportedError, match=r"of that name takes the problem(?s:.*)needs? "):
        device.gemm(x, w, torch.ones(8), kernel=integers[0])
    missing = next((k.name for k in ops.kernels() if not k.is_compiled and "s8" in k.x and "s8" in k.w), None)
    if missing:
        whole = torch.ones(8, 64, dtype=torch.int8)
        with pytest.raises(UnsupportedError, match=missing):
            device.gemm(whole, whole, torch.ones(8), kernel=missing)
    with pytest.raises(ArgumentError, match="kernel"):
        device.gemm(x, w, torch.ones(8), kernel="gemm_of_no_such_name")
