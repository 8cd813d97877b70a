"""Rows of CUTLASS 2.x tiles and decode rows run on chips with 99, 163 and 227 KiB of shared memory a block: they refuse
what cannot hold their stages, and where one is refused another still runs."""

from __future__ import annotations

import pytest
from images import as_images

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

ROWS = [row for row in native.kernel_table() if row["engine"] in ("mma", "decode")]
BITS = {"s4": 4, "s8": 8, "u8": 8, "f16": 16, "bf16": 16}
SMALL = 99 << 10  # sm_86, sm_89


def _problem(row: dict) -> dict:
    x = row["x"][0]
    return {
        "m": row["m_max"] or 64,
        "n": 256,
        "k": 1024,
        "x": x,
        "w": row["w"][0],
        "out": "f32",
        "x_packed": row["x_packing"] == "nibbles",
        "w_layout": row["w_layouts"][0],
        "group_size": row["group_multiple"] if row["groups_only"] else 0,
        "step_size": row["step_multiple"] if row["steps_only"] else 0,
        "experts": 5 if row["experts_only"] else 0,
    } | as_images(row, row["m_max"] or 64, 1024)


def _stages_bytes(row: dict) -> int:
    m, n, k = row["tile"]
    x_bits = max(8 if x == "s4" and row["x_packing"] == "bytes" else BITS[x] for x in row["x"])
    if row["engine"] == "decode":  # eight warps of 32 channels; those of other parts of K keep activations of their own
        parts = 8 * 32 // n
        return parts * m * max(row["stages"] * k * x_bits // 8, 4 * (n + 4))  # the sums take their place
    return row["stages"] * k * (m * x_bits + n * BITS[row["w"][0]]) // 8


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_a_row_refuses_a_device_that_cannot_hold_its_stages(row: dict) -> None:
    need = _stages_bytes(row)
    device = {"sm": row["sm_min"], "sm_count": 100}
    for enough in (0, need, need + 1):  # 0: not known
        assert native.refusal(row["name"], _problem(row), device | {"shared_bytes": enough}, False)[0]
    ok, wanted, got, text = native.refusal(row["name"], _problem(row), device | {"shared_bytes": need - 1}, False)
    assert (ok, wanted, got) == (False, need, need - 1)
    assert text == f"needs {need} bytes of shared memory a block, the device has {need - 1}"


def test_every_row_fits_an_a100_and_every_family_has_one_for_small_chips() -> None:
    assert ROWS
    assert {row["name"] for row in ROWS if _stages_bytes(row) > 163 << 10} == set()
    fits = {row["family"] for row in ROWS if _stages_bytes(row) <= SMALL}
    assert fits == {row["family"] for row in ROWS}
