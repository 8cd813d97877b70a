"""The table of kernels is sane: names, tiles and facts that a reader of it relies on."""

from __future__ import annotations

import re

import pytest

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

TABLE = native.kernel_table()
TYPES = {"s4", "s8", "u8", "s32", "f16", "bf16", "f32"}
NUMBERS = ("x_align", "w_align", "out_align", "k_multiple", "acc_scale")


def test_names_are_unique_and_say_family_and_tile() -> None:
    names = [row["name"] for row in TABLE]
    assert len(names) == len(set(names)) > 1
    for row in TABLE:
        assert re.fullmatch(r"gemm_[a-z0-9_]+", row["name"])
        assert row["name"].startswith(f"gemm_{row['family']}_")
        if row["engine"] != "byte_wise":
            assert "_{}x{}x{}".format(*row["tile"]) in row["name"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_facts_are_sane(row: dict) -> None:
    assert all(row[key] for key in ("x", "w", "out", "w_layouts"))
    assert {*row["x"], *row["w"], *row["out"]} <= TYPES
    assert "s32" not in row["out"] or set(row["x"]) <= {"s8", "u8", "s4"}, "a float accumulator is not s32"
    assert all(row[key] >= 1 for key in NUMBERS)
    assert all(row[key] & (row[key] - 1) == 0 for key in NUMBERS), "powers of two"
    assert all(size > 0 for size in (*row["tile"], *row["cluster"]))
    assert row["cluster"] == (1, 1) or row["sm_min"] >= 90, "clusters came with Hopper"
    assert row["cluster"][0] * row["cluster"][1] <= 8
    assert 70 <= row["sm_min"] < row["sm_end"]
    assert row["m_max"] >= 0
    assert not row["groups_only"] or row["group_multiple"] > 0
    assert not row["steps_only"] or row["step_multiple"] > 0
    assert not row["steps_only"] or not row["groups_only"]
    assert row["stages"] >= 0
    if row["engine"] == "mma":
        x_bytes = 0.5 if row["x_packing"] == "nibbles" else max(native_bits(x) for x in row["x"]) / 8
        w_bytes = max(native_bits(w) for w in row["w"]) / 8
        tile_m, tile_n, tile_k = row["tile"]
        assert row["stages"] * tile_k * (tile_m * x_bytes + tile_n * w_bytes) <= 163 * 1024, "an A100's shared memory"


def native_bits(name: str) -> int:
    return {"s4": 4, "s8": 8, "u8": 8, "f16": 16, "bf16": 16}[name]


def test_rows_of_one_family_share_their_facts() -> None:
    private = {"name", "tile", "cluster", "schedule", "stages", "selectable", "compiled"}
    families: dict[str, dict] = {}
    for row in TABLE:
        facts = {key: value for key, value in row.items() if key not in private}
        assert families.setdefault(row["family"], facts) == facts


def test_no_two_rows_are_the_same_kernel() -> None:
    keys = [(row["family"], row["tile"], row["cluster"], row["schedule"], row["stages"]) for row in TABLE]
    assert len(keys) == len(set(keys))
