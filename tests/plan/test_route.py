"""The route of a call is a pure function: which form of the activations, which row, on pretended devices."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import plan_grid as grid
import pytest

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

ANY = "gemm_simt_any"
PASS_US = 3.0  # kPassUs of csrc/plan/route.cpp
ENGINES = {row["name"]: row["engine"] for row in native.kernel_table()}
INT4 = {"w": "s4", "has_zero_point": True}  # as static per-tensor inputs ask


def route(entry: str, problem: dict[str, Any], sm: int = 80, **more: Any) -> tuple[str, str | None]:
    form, name, *_ = native.route(
        entry, {"m": 256, "n": 4096, "k": 4096, "out": "f16"} | problem, grid.DEVICES[sm], only_compiled=False, **more
    )
    return form, name


BANK = {"x": "bf16", "w": "s4", "group_size": 128, "experts": 8}
CHOSEN = BANK | {"chooses_rows": True}
FEW, ROUNDED = "gemm_sm80_w4a16_experts", "gemm_sm90_w4a16_rounded_experts"
STEPS = {"w": "s4", "w_layout": "blocked128", "step_size": 128}
# entry, problem, int4_range, sm -> form and the beginning of the row's name
CASES = {
    "float rows become bytes": ("linear", {"x": "f16"}, False, 80, "bytes", "gemm_sm80_s8s8"),
    "whatever K is": ("linear", {"x": "f32", "k": 4097}, False, 80, "bytes", "gemm_sm80_s8s8"),
    "a token gets a decode row": (
        "linear",
        {"x": "f16", "m": 1, "n": 1024},
        False,
        90,
        "bytes",
        "gemm_sm90_decode_s8s8",
    ),
    "many int4 codes are packed": ("linear", {"x": "f16", "m": 4096} | INT4, True, 80, "nibbles", "gemm_sm80_s4s4"),
    "few are not worth the pass": ("linear", {"x": "f16", "m": 16} | INT4, True, 80, "bytes", "gemm_sm80_s8s4"),
    "Hopper takes int4 as bytes": ("linear", {"x": "f16", "m": 4096} | INT4, True, 90, "bytes", "gemm_sm90_s8s4"),
    "groups": ("linear", {"x": "f16", "w": "s4", "group_size": 128}, False, 80, "bytes", "gemm_sm80_s8s4_groups"),
    "steps": ("linear", {"x": "f16", "w": "s4", "step_size": 128}, False, 80, "bytes", "gemm_sm80_s8s4_steps"),
    "of few tokens": (
        "linear",
        {"x": "f16", "m": 1, "n": 1024, "w": "s4", "step_size": 64},
        False,
        80,
        "bytes",
        "gemm_decode_s8s4_steps",
    ),
    "on Hopper": ("linear", {"x": "f16"} | STEPS, False, 90, "bytes", "gemm_sm90_s8s4_steps"),
    "of a token there": (
        "linear",
        {"x": "f16", "m": 1, "n": 1024} | STEPS,
        False,
        90,
        "bytes",
        "gemm_sm90_decode_s8s4_steps",
    ),
    "of 16 codes": ("linear", {"x": "f16", "w": "s4", "step_size": 16}, False, 80, "bytes", ANY),
    "int8 codes as they lie": ("linear", {"x": "s8"}, False, 80, "given", "gemm_sm80_s8s8"),
    "unaligned codes are moved": ("linear", {"x": "s8", "x_align": 1}, False, 80, "bytes", "gemm_sm80_s8s8"),
    "odd rows too": ("linear", {"x": "s8", "k": 4097, "x_align": 1}, False, 80, "bytes", "gemm_sm80_s8s8"),
    "uint8 codes as they lie": ("linear", {"x": "u8"}, False, 80, "given", "gemm_sm80_u8s8"),
    "on Hopper too": ("linear", {"x": "u8"}, False, 90, "given", "gemm_sm80_u8s8"),
    "packed codes as they lie": ("linear", {"x": "s4", "x_packed": True} | INT4, True, 80, "given", "gemm_sm80_s4s4"),
    "packed codes for Hopper": ("linear", {"x": "s4", "x_packed": True} | INT4, True, 90, "bytes", "gemm_sm90_s8s4"),
    "no gain, no pass": (
        "linear",
        {"x": "s8", "x_align": 1, "w": "s4", "group_size": 16},
        False,
        80,
        "given",
        ANY,
    ),
    "a product packs": ("gemm", {"x": "s4", "m": 4096} | INT4, False, 80, "nibbles", "gemm_sm80_s4s4"),
    "not odd rows": ("gemm", {"x": "s4", "m": 4096, "k": 4008, "x_align": 8} | INT4, False, 80, "given", ANY),
    "nor strided ones": ("gemm", {"x": "s4", "m": 4096, "ldx": 8192} | INT4, False, 80, "given", "gemm_sm80_s8s4"),
    "nor int8": ("gemm", {"x": "s8", "x_align": 1}, False, 80, "given", ANY),
    "a product unpacks": ("gemm", {"x": "s4", "x_packed": True} | INT4, False, 90, "bytes", "gemm_sm90_s8s4"),
    "floats by the framework": ("float_linear", {"x": "f16", "w": "f16"}, False, 90, "framework", None),
    "codes of very many tokens, too": ("float_linear", {"x": "f16", "m": 8192}, False, 90, "framework", None),
    "of fewer, by a row of ours": ("float_linear", {"x": "f16", "m": 64}, False, 90, "given", "gemm_sm90_w8a16"),
    "and of int4": ("float_linear", {"x": "bf16", "m": 64, "w": "s4"}, False, 80, "given", "gemm_decode_w4a16"),
    "in groups, too": (
        "float_linear",
        {"x": "f16", "m": 64, "w": "s4", "group_size": 64},
        False,
        86,
        "given",
        "gemm_decode_w4a16",
    ),
    "of more": ("float_linear", {"x": "f16", "m": 192, "w": "s4"}, False, 86, "given", "gemm_sm80_w4a16"),
    "of few, by our row": ("float_linear", {"x": "bf16", "m": 4}, False, 90, "given", "gemm_sm90_decode_w8a16"),
    "float32 rows": ("float_linear", {"x": "f32", "m": 4}, False, 90, "framework", None),
    "experts that decode": ("float_linear", BANK | {"m": 128}, False, 90, "given", FEW),
    "in any order": ("float_linear", CHOSEN | {"m": 128}, False, 90, "given", FEW),
    "of many rows": ("float_linear", BANK | {"m": 4096}, False, 90, "given", ROUNDED),
    "that have no order": ("float_linear", CHOSEN | {"m": 4096}, False, 90, "sorted", ROUNDED),
    "nor on other chips": ("float_linear", CHOSEN | {"m": 4096}, False, 80, "given", FEW),
    "of few channels": ("float_linear", CHOSEN | {"m": 256, "n": 64, "k": 128}, False, 90, "given", FEW),
}


@pytest.mark.parametrize("case", CASES)
def test_the_route_of(case: str) -> None:
    entry, problem, int4_range, sm, form, row = CASES[case]
    found = route(entry, problem, sm, int4_range=int4_range)
    assert found[0] == form, found
    assert (found[1] is None) if row is None else str(found[1]).startswith(row), found


def test_an_unknown_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="entry 'layer'"):
        native.route("layer", {}, grid.DEVICES[80])


def test_only_rows_of_this_build_are_routed_to() -> None:
    compiled = {row["name"] for row in native.kernel_table() if row["compiled"]}
    _, name, *_ = native.route("linear", {"m": 8, "n": 64, "k": 64, "x": "f16", "out": "f16"}, grid.DEVICES[80])
    assert name in compiled or name is None


def drawn(count: int) -> list[tuple[int, dict[str, Any], bool]]:
    """(sm, problem without the type of x, whether its codes have 4 bits)."""
    coin = random.Random(20)
    cases = []
    for _ in range(count):
        k = coin.choice((96, 512, 4096, 11008, 1000, 40, 8191))
        weights = coin.choice(({}, {"w": "s4"}, {"w": "s4", "group_size": 32}, {"w": "s4", "step_size": 32}))
        if k % weights.get("group_size", 1) or k % weights.get("step_size", 1):
            weights = {"w": "s4"}
        problem = {"m": coin.choice((1, 7, 33, 300, 5000)), "n": coin.choice((72, 1024, 28672)), "k": k, **weights}
        problem |= {"out": coin.choice(("f16", "s8")), "x_align": coin.choice((1, 16, 16)), "has_zero_point": True}
        cases.append((coin.choice(list(grid.DEVICES)), problem, coin.random() < 0.5))
    return cases


def best(problem: dict[str, Any], sm: int) -> tuple[str | None, float]:
    name, us, _ = native.select(problem, grid.DEVICES[sm], only_compiled=False)
    return name, math.inf if name is None else us


def rewritten(problem: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its forms in new memory, by the rule of docs/kernels.md: rows of whole 32 codes, group scales end at K."""
    row = -(-problem["k"] // 32) * 32
    k = (
        problem["k"]
        if problem.get("group_size") or problem.get("step_size") or row > native.k_bound(problem | {"x": "s8"})
        else row
    )
    free = problem | {"ldx": row, "x_align": 16, "k": k}
    return {
        "s8": free | {"x": "s8"},
        "s4": free | {"x": "s4"},
        "nibbles": free | {"x": "s4", "x_packed": True},
    }


def padded(problem: dict[str, Any], sm: int, int4_range: bool) -> tuple[str, str | None]:
    forms = rewritten(problem)
    times = {"s8": best(forms["s8"], sm)[1]}
    if int4_range:
        times |= {"s4": best(forms["s4"], sm)[1], "nibbles": best(forms["nibbles"], sm)[1] + PASS_US}
    cheapest = min(times, key=lambda form: times[form])
    return "nibbles" if cheapest == "nibbles" else "bytes", best(forms[cheapest], sm)[0]


def test_float_rows_get_the_cheapest_of_the_forms_they_can_take() -> None:
    for sm, problem, int4_range in drawn(400):
        want = padded(problem, sm, int4_range)
        assert route("linear", problem | {"x": "f16"}, sm, int4_range=int4_range) == want, (sm, problem)


def test_codes_move_only_to_reach_a_tensor_core_row() -> None:
    moved = set()
    for (sm, problem, int4_range), x in itertools.product(drawn(200), ("s8", "u8")):
        given, _ = best(problem | {"x": x}, sm)
        found = route("linear", problem | {"x": x}, sm, int4_range=int4_range)
        arranged, _ = best(rewritten(problem)["s8"], sm)
        stays = given is not None and (given != ANY or arranged in (None, ANY))
        assert found == (("given", given) if stays else padded(problem, sm, int4_range)), (sm, problem, x)
        moved.add(stays)
    assert moved == {True, False}


def dequantised_us(problem: dict[str, Any], sm: int) -> float:
    """The framework's product of dequantised weights: a pass that reads codes and writes 16 bits comes before it."""
    device = grid.DEVICES[sm]
    weights = problem["n"] * problem["k"] * (2.5 if problem.get("w") == "s4" else 3)
    sizes = (problem["m"], problem["n"], problem["k"])
    return (
        native.framework_time(*sizes, problem["x"], device)[0] + 3 + weights / native.chip(device)["dram_bytes_per_us"]
    )


def test_integer_weights_are_dequantised_where_that_is_quicker_and_nowhere_else() -> None:
    seen = set()
    for sm, problem, _ in drawn(400):
        asked = problem | {"x": "f16", "out": "f16", "has_zero_point": False}
        name, us = best(asked, sm)
        engine = ENGINES.get(str(name))
        is_own = engine == "decode" or (engine in ("mma", "wgmma") and us <= dequantised_us(asked, sm))
        assert route("float_linear", asked, sm) == (("given", name) if is_own else ("framework", None)), (sm, asked)
        seen.add((engine, is_own))
    assert {("decode", True), ("mma", True), ("mma", False), ("wgmma", True), ("wgmma", False)} <= seen


CONV = (28, 128, 128, 3, 1)  # pixels of a side, channels, output channels, kernel, stride


@pytest.mark.parametrize(
    ("change", "form", "row"),
    [
        ({}, "given", "gemm_sm80_s8s8_conv"),
        ({"w": "s4"}, "patches", "gemm_sm80_s8s4"),
        ({"group_size": 128}, "patches", ANY),
        ({"x_align": 8}, "patches", "gemm_sm80_s8s8"),
        ({"out": "s8", "has_zero_point": True}, "given", "gemm_sm80_s8s8_conv"),
    ],
    ids=str,
)
def test_images_are_read_where_a_row_reads_them(change: dict[str, Any], form: str, row: str) -> None:
    problem = grid.conv_problem(8, *CONV) | change
    found = native.route("conv", problem, grid.DEVICES[80], only_compiled=False)
    assert found[0] == form
    assert found[1].startswith(row)


@pytest.mark.parametrize("sm", grid.DEVICES)
def test_patches_are_written_where_that_is_predicted_to_pay(sm: int) -> None:
    """Both ways by hand: a row that reads the images, and the quickest for rows written before, writing included."""
    device, seen = grid.DEVICES[sm], set()
    for conv in grid.CONVS:
        for batch in grid.BATCHES:
            problem = grid.conv_problem(batch, *conv)
            form, name, us, *_ = native.route("conv", problem, device, only_compiled=False)
            image, image_us, _ = native.select(problem, device, only_compiled=False)
            width = -(-problem["k"] // 32) * 32
            rows = {key: value for key, value in problem.items() if key != "image"}
            matrix, matrix_us, _ = native.select(
                rows | {"k": width, "ldx": width, "x_align": 16}, device, only_compiled=False
            )
            written_us = PASS_US + problem["m"] * width / native.chip(device)["dram_bytes_per_us"]
            pays = image is None or matrix_us + written_us < image_us
            assert (form, name, us) == (("patches", matrix, matrix_us) if pays else ("given", image, image_us))
            seen.add(form)
    assert seen == {"given", "patches"}
