"""The plan, asked from Python for devices that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyquant import ops
from pyquant.ops import plan

pytest.importorskip("pyquant._native", reason="the compiled module is not built")

A100 = plan.Device(sm=80, sm_count=108, shared_bytes=166912, l2_bytes=41943040)
H200 = plan.Device(sm=90, sm_count=132, shared_bytes=232448, l2_bytes=62914560)


@pytest.mark.parametrize(("device", "families"), [(A100, ("gemm_sm80",)), (H200, ("gemm_sm80", "gemm_sm90"))])
@pytest.mark.parametrize("n", [4096, 4099])
def test_int8_layers_get_tensor_cores_whatever_their_n(device: plan.Device, families: tuple[str, ...], n: int) -> None:
    choice = plan.select(ops.LinearSpec(n, 1000), 512, torch.float16, device, only_compiled=False)
    assert choice.kernel is not None
    assert choice.kernel.startswith(families)
    assert choice.predicted_us > 0


@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 256])
def test_groups_of_int4_weights_get_tensor_cores_at_every_m(group_size: int) -> None:
    for m in (1, 17, 64, 512):
        spec = ops.LinearSpec(4096, 3072, w_bits=4, group_size=group_size)
        kernel = plan.select(spec, m, torch.float16, A100, only_compiled=False).kernel or ""
        assert kernel.startswith("gemm_sm80_s8s4_groups" if m > 16 else ("gemm_sm80_s8s4_groups", "gemm_decode_s8s4"))


def test_rows_that_refuse_say_why_with_both_numbers() -> None:
    choice = plan.select(ops.LinearSpec(64, 128, w_bits=4, group_size=16), 8, torch.float32, H200, only_compiled=False)
    assert choice.kernel == "gemm_simt_any"
    assert any("gemm_sm90" in line and any(c.isdigit() for c in line.split(":", 1)[1]) for line in choice.refusals)


def test_the_dtype_of_the_result_counts() -> None:
    us = {
        dtype: plan.select(ops.LinearSpec(28672, 64), 4096, dtype, H200, only_compiled=False).predicted_us
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8)
    }
    assert us[torch.int8] < us[torch.float16] == us[torch.bfloat16] < us[torch.float32]


@pytest.mark.parametrize("m", plan.MANY_ROWS)
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (4096, 6144), (14336, 4096), (4096, 28672)])
def test_blocks_are_quicker_than_rows_where_weights_have_group_scales(k: int, n: int, m: int) -> None:
    """An H200 took 702 us for 4096 rows of 4096 x 4096 in plain rows (`sm80_s8s4_groups_112x64x128`), 210 in blocks."""
    spec = ops.LinearSpec(n, k, w_bits=4, group_size=128)
    rows, blocks = (
        plan.select(replace(spec, layout=layout), m, torch.float16, H200, only_compiled=False).predicted_us
        for layout in ("rows", plan.BLOCKED)
    )
    assert blocks < rows
