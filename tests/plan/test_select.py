"""Selection is a pure function: pinned by name for pretended devices, and every row has a problem that it is for."""

from __future__ import annotations

from pathlib import Path

import plan_grid as grid
import pytest
import torch

from pyquant.errors import ArgumentError
from pyquant.ops import LinearSpec, plan

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

PINNED = Path(__file__).with_name("pinned.txt")
ANY = "gemm_simt_any"
REPIN = "python tests/plan/pin.py > tests/plan/pinned.txt, and read the diff"
# Selectable rows that no problem of the grid gets, and why they are in the table all the same.
UNREACHED: dict[str, str] = {
    "gemm_sm90_s8s8_256x128x128_c2x1_cooperative": "with zero points the quickest of three on an H200, and within 3 %",
}


@pytest.fixture(scope="module")
def found() -> list[str]:
    return list(grid.lines(native))


@pytest.mark.parametrize("section", ["choice", "conv", "card", "cliff", "fall", "unreached"])
def test_what_is_chosen_is_written_down(found: list[str], section: str) -> None:
    pinned = [line for line in PINNED.read_text().splitlines() if line.startswith(section)]
    now = [line for line in found if line.startswith(section)]
    changed = sorted(set(now) ^ set(pinned))
    assert now == pinned, f"{len(changed)} lines differ: {REPIN}\n" + "\n".join(changed[:20])


def test_pins_are_many_and_cover_every_device_and_pair(found: list[str]) -> None:
    choices = [line for line in found if line.startswith("choice")]
    assert len(choices) == len(grid.DEVICES) * len(grid.PAIRS | grid.EXPERTS) * len(grid.SHAPES) >= 200


def test_every_selectable_row_is_reached_or_has_a_reason(found: list[str]) -> None:
    unreached = {line.split()[1] for line in found if line.startswith("unreached")}
    assert unreached == set(UNREACHED), "give the row a problem that it is the best for, or a reason in UNREACHED"


@pytest.mark.parametrize("sm", grid.DEVICES)
def test_int8_layers_get_tensor_cores_at_every_m(sm: int) -> None:
    for n, k in ((4096, 4096), (4099, 1008), (8, 16)):
        for name, _ in native.sweep({"n": n, "k": k, "out": "f16"}, grid.DEVICES[sm], "m", [1, 17, 100, 4096]):
            assert name not in (None, ANY)


@pytest.mark.parametrize("more", [{"x_align": 8}, {"w_align": 1}, {"group_size": 16, "w": "s4"}])
def test_memory_and_groups_that_tensor_cores_cannot_take_still_run(more: dict) -> None:
    problem = {"m": 4096, "n": 4096, "k": 4096, "out": "f16", **more}
    assert native.select(problem, grid.DEVICES[90], only_compiled=False)[0] == ANY


def test_rows_that_are_only_measured_are_never_chosen() -> None:
    bench = {row["name"] for row in native.kernel_table() if not row["selectable"]}
    for sm in grid.DEVICES:
        for pair in grid.PAIRS.values():
            problem = {"n": 4096, "k": 4096, **pair, "out": "f16"}
            assert not bench & {name for name, _ in native.sweep(problem, grid.DEVICES[sm], "m", list(grid.MS))}


def test_without_compiled_rows_nothing_is_chosen() -> None:
    compiled = [row["name"] for row in native.kernel_table() if row["compiled"]]
    name, _, refusals = native.select({"m": 1, "n": 64, "k": 64, "out": "f16"}, grid.DEVICES[80])
    assert name in compiled if compiled else name is None
    assert set(refusals) <= set(compiled), "rows that are not built are not asked"


FOUNDING = ((32768, 16384), (16384, 8192), (8192, 4096), (4096, 2048), (2048, 1024), (1024, 32768))
INT4_CHIPS = {
    "A100": plan.Device(80, 108, 166912, 41943040, 1555),
    "A10": plan.Device(86, 72, 101376, 6291456, 600),
    "L4": plan.Device(89, 58, 101376, 50331648, 300),
}


@pytest.mark.parametrize("out", [torch.float16, torch.uint8], ids=str)
@pytest.mark.parametrize("chip", INT4_CHIPS)
def test_int4_times_int4_is_what_packed_codes_get(chip: str, out: torch.dtype) -> None:
    """The founding experiment's layers, and few rows: the int4 tensor cores of sm_80 to sm_89, never int8's."""
    taken = set()
    for k, n in FOUNDING:
        spec = LinearSpec(
            n, k, w_bits=4, input="static", x_qmin=-7, x_qmax=7, codes_out=out == torch.uint8, out_qmin=-7, out_qmax=7
        )
        # of few rows that come as floats, a pass that packs their codes would cost more than it gains
        for m, given in ((64, "packed"), (2048, "packed"), (2048, "floats")):
            choice = plan.select(spec, m, out, INT4_CHIPS[chip], only_compiled=False, given=given)
            assert str(choice.kernel).startswith("gemm_sm80_s4s4_"), (chip, m, n, k, given, choice.kernel)
            taken.add(choice.kernel)
    if chip == "A100":
        assert "gemm_sm80_s4s4_128x256x256" in taken


def test_hopper_multiplies_int4_codes_as_bytes() -> None:
    h200 = plan.Device(90, 132, 232448, 62914560, 4800)
    spec = LinearSpec(4096, 4096, w_bits=4, input="static", x_qmin=-7, x_qmax=7)
    for given in plan.GIVEN:
        assert (
            str(plan.select(spec, 2048, torch.float16, h200, only_compiled=False, given=given).kernel)[:9]
            == "gemm_sm90"
        )


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ArgumentError, match="given"):
        plan.select(LinearSpec(64, 64), 1, torch.float16, INT4_CHIPS["A100"], given="bytes")
