"""Selection is a pure function: pinned by name for pretended devices, and every row has a problem that it is for."""

from __future__ import annotations

from pathlib import Path

import plan_grid as grid
import pytest

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

PINNED = Path(__file__).with_name("pinned.txt")
ANY = "gemm_simt_any"
REPIN = "python tests/plan/pin.py > tests/plan/pinned.txt, and read the diff"
# Selectable rows that no problem of the grid gets, and why they are in the table all the same.
UNREACHED: dict[str, str] = {}


@pytest.fixture(scope="module")
def found() -> list[str]:
    return list(grid.lines(native))


@pytest.mark.parametrize("section", ["choice", "cliff", "fall", "unreached"])
def test_what_is_chosen_is_written_down(found: list[str], section: str) -> None:
    pinned = [line for line in PINNED.read_text().splitlines() if line.startswith(section)]
    now = [line for line in found if line.startswith(section)]
    changed = sorted(set(now) ^ set(pinned))
    assert now == pinned, f"{len(changed)} lines differ: {REPIN}\n" + "\n".join(changed[:20])


def test_pins_are_many_and_cover_every_device_and_pair(found: list[str]) -> None:
    choices = [line for line in found if line.startswith("choice")]
    assert len(choices) == len(grid.DEVICES) * len(grid.PAIRS) * len(grid.SHAPES) >= 200


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
