"""Measured choices come before the model, whichever thread asks, and what cannot be followed is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import plan_grid as grid
import pytest

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

GPU = "Some GPU 80GB"
DEVICE = grid.DEVICES[80] | {"name": GPU}
PROBLEM = {"m": 64, "n": 4096, "k": 4096, "out": "f16"}
ANY = "gemm_simt_any"


def line(m: int = 64, row: str = ANY, us: float = 1.5, gpu: str = GPU, **change: object) -> str:
    fields = {
        "x": "s8",
        "w": "s8",
        "out": "f16",
        "x_packed": 0,
        "w_layout": "natural",
        "group_size": 0,
        "n": 4096,
        "k": 4096,
    } | change
    return "\t".join(str(v) for v in (gpu, *fields.values(), m, row, us))


@pytest.fixture(autouse=True)
def _no_table() -> Iterator[None]:
    native.set_tuned("")
    yield
    native.set_tuned("")


def chosen(problem: dict = PROBLEM, device: dict = DEVICE) -> str:
    return native.select(problem, device, only_compiled=False)[0]


def test_a_measured_choice_wins_with_its_time() -> None:
    by_model = chosen()
    assert by_model != ANY
    assert native.set_tuned(line()) == []
    name, us, refusals = native.select(PROBLEM, DEVICE, only_compiled=False)
    assert (name, us) == (ANY, 1.5)
    assert by_model not in refusals
    assert native.tuned(PROBLEM, DEVICE) == (ANY, 1.5)
    native.set_tuned("")
    assert chosen() == by_model
    assert native.tuned(PROBLEM, DEVICE) is None


@pytest.mark.parametrize(
    "change",
    [{"m": 65}, {"m": 48}, {"n": 4112}, {"k": 4080}, {"out": "bf16"}, {"w": "s4"}, {"x": "u8"}, {"group_size": 64}],
)
def test_a_choice_holds_for_its_problem_alone(change: dict) -> None:
    native.set_tuned(line())
    assert native.tuned(PROBLEM | change, DEVICE) is None


@pytest.mark.parametrize("name", ["", "Some GPU", "Some GPU 80GB "])
def test_a_choice_holds_for_its_gpu_alone(name: str) -> None:
    native.set_tuned(line())
    assert native.tuned(PROBLEM, DEVICE | {"name": name}) is None


def test_buckets_of_m() -> None:
    bounds = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    want = {m: min(b for b in bounds if b >= m) for m in range(1, 1025)}
    assert {m: native.m_bucket(m) for m in want} == want
    native.set_tuned(line(m=64))
    assert [m for m in range(1, 200) if native.tuned(PROBLEM | {"m": m}, DEVICE)] == list(range(49, 65))


def test_an_unknown_row_is_left_out_and_said() -> None:
    left_out = native.set_tuned("\n".join([line(row="gemm_gone"), line(m=128)]))
    assert len(left_out) == 1
    assert "gemm_gone" in left_out[0]
    assert left_out == native.tuned_remarks()
    assert chosen() != ANY
    assert chosen(PROBLEM | {"m": 128}) == ANY


def test_a_row_that_refuses_is_not_used_and_said_once() -> None:
    hopper = next((r["name"] for r in native.kernel_table() if r["sm_min"] == 90 and r["selectable"]), None)
    if hopper is None:
        pytest.skip("the table has no row for Hopper only")
    by_model = chosen()
    assert native.set_tuned(line(row=hopper)) == []
    for _ in range(3):
        assert chosen() == by_model
    (remark,) = native.tuned_remarks()
    assert hopper in remark
    assert "90" in remark
    compiled = {r["name"]: r["compiled"] for r in native.kernel_table()}
    if not compiled[ANY]:
        native.set_tuned(line())
        native.select(PROBLEM, DEVICE)
        assert "machine code" in native.tuned_remarks()[0]


@pytest.mark.parametrize(
    "bad",
    [
        "no tabs",
        line() + "\tmore",
        line(m=-1),
        line(x="s9"),
        line(w_layout="odd"),
        line(n="4096x"),
        line(us="soon"),
        line(us=-1),
        line(us="nan"),
    ],
)
def test_a_damaged_table_is_refused_and_the_old_one_stays(bad: str) -> None:
    native.set_tuned(line())
    with pytest.raises(ValueError, match="tuned table"):
        native.set_tuned(bad)
    assert chosen() == ANY


def form_of(problem: dict) -> str:
    return native.route("float_linear", problem, DEVICE, only_compiled=False)[0]


def test_torch_as_the_quickest_float_product() -> None:
    problem = PROBLEM | {"x": "f16", "w": "f16"}
    native.set_tuned(line(row="torch", x="f16", w="f16"))
    assert native.tuned(problem, DEVICE) == ("torch", 1.5)
    assert form_of(problem) == "framework"


def test_float_products_are_ours_only_where_measured() -> None:
    problem = PROBLEM | {"x": "f16", "w": "f16"}
    native.set_tuned("")
    assert form_of(problem) == "framework"
    name = next(r["name"] for r in native.kernel_table() if r["family"] == "sm80_f16")
    native.set_tuned(line(row=name, x="f16", w="f16"))
    assert form_of(problem) == "given"


def test_remembered_choices_follow_the_tables_in_every_thread() -> None:
    compiled = {r["name"] for r in native.kernel_table() if r["compiled"]}

    def want(name: str | None) -> bool:
        return native.choose(PROBLEM, DEVICE) == name

    by_model = native.select(PROBLEM, DEVICE)[0]
    failed: list[str] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        for _ in range(3):
            barrier.wait()
            for _ in range(200):
                if native.choose(PROBLEM, DEVICE) != native.select(PROBLEM, DEVICE)[0]:
                    failed.append("stale")
            barrier.wait()

    threads = [threading.Thread(target=ask) for _ in range(7)]
    for thread in threads:
        thread.start()
    for table in (line(), "", line(us=2.0)):
        native.set_tuned(table)
        assert want(ANY if table and ANY in compiled else by_model)
        barrier.wait()
        barrier.wait()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_remembered_choice_is_the_selected_one_for_many_problems() -> None:
    for _ in range(2):  # the second time from memory
        for index in range(3000):
            problem = {
                "m": index % 97,
                "n": 64 * (index % 13),
                "k": 16 * (index % 31),
                "out": ("f16", "s8")[index % 2],
                "x_align": (16, 8)[index % 3 == 0],
            }
            device = grid.DEVICES[(80, 90)[index % 5 == 0]]
            assert native.choose(problem, device) == native.select(problem, device)[0]
    assert native.time_choose(PROBLEM, DEVICE, 10) > 0
