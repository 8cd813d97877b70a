"""Every card with int8 tensor cores: its rates are the published ones, kernels fit it, int8 gains what they bear."""

from __future__ import annotations

from pathlib import Path

import plan_grid as grid
import pytest
from images import as_images

from bench.cards import CARDS, Card, gain, page

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

ROWS = native.kernel_table()
NAMES = [card.name for card in CARDS]
_BITS = {"s4": 4, "s8": 8, "u8": 8, "f16": 16, "bf16": 16}


def named(part: str) -> Card:
    return next(card for card in CARDS if part in card.name)


def shared_bytes(row: dict) -> int:
    """Of a block, from the tile: what CUTLASS's main loops of mma.sync and the decode kernels ask for."""
    x_bits = max(8 if x == "s4" and row["x_packing"] == "bytes" else _BITS[x] for x in row["x"])
    m, n, k = row["tile"]
    if row["engine"] == "decode":
        return (8 * 32 // n) * m * max(row["stages"] * k * x_bits // 8, 4 * (n + 4))
    return row["stages"] * k * (m * x_bits + n * _BITS[row["w"][0]]) // 8


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_the_rates_are_the_published_ones(card: Card) -> None:
    chip = native.chip(card.device)
    per_mac = 2 * card.sm_count * (card.rated_mhz or card.clock_mhz) * 1e6 / 1e12
    if card.int8 is not None:
        assert max(chip["mma_macs"], chip["wgmma_macs"]) * per_mac == pytest.approx(card.int8, rel=0.03)
    assert chip["framework_macs"] * per_mac == pytest.approx(card.bf16, rel=0.03)
    assert chip["clocks_per_us"] <= card.clock_mhz


def test_a_geforce_adds_floats_at_half_the_rate() -> None:
    professional, gamer = native.chip(named("L40S").device), native.chip(named("4090").device)
    assert gamer["mma_float_macs"] == professional["mma_float_macs"] / 2
    assert gamer["mma_macs"] == professional["mma_macs"]
    for name in ("", "GeForc", "NVIDIA RTX 6000 Ada Generation", "Quadro GeGeForc"):
        assert native.chip(named("4090").device | {"name": name})["mma_float_macs"] == professional["mma_float_macs"]
    assert native.chip({"sm": 89, "name": "GeGeForce"})["mma_float_macs"] == gamer["mma_float_macs"]


def test_a_slow_clock_counts() -> None:
    l4 = named("L4").device
    problem = {"m": 8192, "n": 8192, "k": 8192, "out": "f16"}
    fast, slow = (native.sweep(problem, l4 | {"clock_mhz": mhz}, "m", [8192])[0][1] for mhz in (2040, 1020))
    assert slow > 1.8 * fast


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_no_kernel_asks_for_more_shared_memory_than_the_card_has(card: Card) -> None:
    """Every row, and every choice of a wide grid."""
    need = {row["name"]: shared_bytes(row) for row in ROWS if row["engine"] in ("mma", "decode")}
    too_large = {name for name, size in need.items() if size > card.shared_kib << 10}
    assert bool(too_large) == (card.shared_kib == 99)
    for row in ROWS:
        if row["name"] in too_large and row["sm_min"] <= card.sm < row["sm_end"]:
            problem = {"m": 8, "n": 256, "k": 1024, "x": row["x"][0], "w": row["w"][0], "out": "f32"}
            problem |= {"x_packed": row["x_packing"] == "nibbles", "w_layout": row["w_layouts"][0]}
            problem["group_size"] = row["group_multiple"] if row["groups_only"] else 0
            problem["step_size"] = row["step_multiple"] if row["steps_only"] else 0
            problem["experts"] = 5 if row["experts_only"] else 0
            problem |= as_images(row, 8, 1024)
            assert "shared memory" in native.refusal(row["name"], problem, card.device, False)[3]
    for pair in grid.PAIRS.values():
        for n, k in grid.SHAPES:
            chosen = {name for name, _ in native.sweep({"n": n, "k": k, **pair}, card.device, "m", list(grid.MS))}
            assert not chosen & too_large


@pytest.mark.parametrize(("part", "least"), [("3090", 2.5), ("4090", 2.5), ("5090", 2.5), ("A100", 1.8), ("L40S", 1.8)])
def test_int8_gains_what_the_published_rates_bear(part: str, least: float) -> None:
    """A whole product beside one in bf16 by a kernel of the same family, at sizes of language models' layers."""
    device = named(part).device
    for n, k in ((4096, 4096), (14336, 4096), (8192, 8192)):
        for m in (2048, 4096, 8192):
            sizes = {"m": m, "n": n, "k": k, "out": "bf16"}
            int8, bf16 = (
                native.sweep(sizes | types, device, "m", [m])[0][1] for types in ({}, {"x": "bf16", "w": "bf16"})
            )
            assert bf16 / int8 >= least


def test_the_gain_on_an_rtx_3090_is_the_published_one() -> None:
    """A fused int8 product takes 1/2.8 to 1/4.2 of bf16's time there (arXiv 2606.14598)."""
    sizes = {"m": 4096, "n": 4096, "k": 4096, "out": "bf16"}
    device = named("3090").device
    int8, bf16 = (native.sweep(sizes | types, device, "m", [4096])[0][1] for types in ({}, {"x": "bf16", "w": "bf16"}))
    assert 2.8 <= bf16 / int8 <= 4.2


def test_int8_products_of_a_b300_take_what_they_were_measured_to() -> None:
    """1.75 ms by mma.sync for 8192 x 4096 x 4096 (pytorch issue 187094), from which the model has the rate."""
    name, us = native.sweep({"m": 8192, "n": 4096, "k": 4096}, named("B300").device, "m", [8192])[0]
    assert name.startswith("gemm_sm80_")
    assert us == pytest.approx(1751, rel=0.35)


def test_whole_dynamic_layers_gain_on_an_rtx_4090() -> None:
    """The quantiser counted."""
    for n, k in ((4096, 4096), (14336, 4096), (8192, 8192)):
        for m in (2048, 4096, 8192):
            assert gain(named("4090"), "W8A8Dynamic", n, k, m) >= 2.5


def test_the_page_is_what_the_model_says_now() -> None:
    written = Path(__file__).resolve().parents[2] / "docs" / "cards.md"
    assert written.read_text() == page(), "python -m bench.cards > docs/cards.md"


@pytest.mark.parametrize("tops", [489, 508])
def test_published_products_of_an_a100(tops: float) -> None:
    """1024 x 8192 x 21760 by vLLM and by sgl-kernel (sglang pull request 2752), from which the model has nothing."""
    us = native.sweep({"n": 8192, "k": 21760, "out": "bf16"}, named("A100").device, "m", [1024])[0][1]
    assert 2 * 1024 * 8192 * 21760 / us / 1e6 == pytest.approx(tops, rel=0.15)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "us"),
    [
        # vLLM's and sgl-kernel's own choices, in one run (sglang pull request 3035): 1321 TOPS, 75 us. Its 34 us for
        # 256 x 4096 x 8192 are launched one by one: an H200 took 28 for 256 x 4096 x 14336 in a graph.
        (2048, 4096, 8192, "128x128x128_c2x1_pingpong", 104),
        (1, 8192, 21760, "64x128x256_c1x4_plain", 75),
        (32, 8192, 21760, "64x128x256_c1x4_plain", 75),
        # vLLM after tuning (its pull request 5514)
        (1, 22016, 4096, "64x128x256_c1x4_plain", 40),
        (1, 12288, 4096, "64x128x256_c1x4_plain", 23.5),
    ],
)
def test_published_products_of_an_h100_by_tiles_that_are_ours_too(m: int, n: int, k: int, tile: str, us: float) -> None:
    """None of them is where the model has its figures from."""
    problem = {"m": m, "n": n, "k": k, "out": "bf16"}
    assert native.cost_us(f"gemm_sm90_s8s8_{tile}", problem, named("H100").device) == pytest.approx(us, rel=0.15)


@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    [
        (4096, 36864, 7168, 2 * 4096 * 36864 * 7168 / 737e6),  # 737 TFLOPS, vLLM pull request 23280
        (1, 12288, 73728, 592),  # vLLM pull request 23198
        (1, 8192, 8192, 2 * 8192 * 8192 / 2.3e6),  # 2.30 TFLOPS with the launch in it, humming pull request 2
    ],
)
def test_published_products_of_the_framework_on_an_h100(m: int, n: int, k: int, us: float) -> None:
    assert native.framework_time(m, n, k, "bf16", named("H100").device)[0] == pytest.approx(us, rel=0.18)


def test_the_published_record_of_an_h100() -> None:
    """1357 TOPS (sglang pull request 3035)."""
    problem = {"m": 1024, "n": 8192, "k": 21760, "out": "bf16"}
    us = native.cost_us("gemm_sm90_s8s8_128x128x128_c2x1_pingpong", problem, named("H100").device)
    assert 2 * 1024 * 8192 * 21760 / us / 1e6 > 1300
