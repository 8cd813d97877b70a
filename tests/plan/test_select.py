"""Selection is a pure function: pinned by name for pretended devices, complete in its refusals, without cliffs."""

from __future__ import annotations

import pytest
from problems import BASE_SEED, Draw

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

DEVICES = {sm: {"sm": sm, "sm_count": count} for sm, count in ((80, 108), (86, 84), (89, 128), (90, 132), (100, 148))}
ROWS = {row["name"]: row for row in native.kernel_table()}
SMALL, SHORT = "gemm_sm80_s8s8_16x64x128", "gemm_sm80_s8s8_32x64x128"
MIDDLE, LARGE = "gemm_sm80_s8s8_64x64x64", "gemm_sm80_s8s8_128x128x64"
PINGPONG = "gemm_sm90_s8s8_64x128x128_c1x1_pingpong"
COOPERATIVE = "gemm_sm90_s8s8_128x256x128_c2x1_cooperative"
ANY = "gemm_simt_any"


def chosen(sm: int, m: int, n: int, k: int, **more: object) -> tuple[str | None, float, dict[str, str]]:
    return native.select({"m": m, "n": n, "k": k, "out": "f16", **more}, DEVICES[sm], only_compiled=False)


PINNED = [
    (80, 1, 4096, 4096, SMALL),
    (80, 64, 4096, 4096, SHORT),
    (80, 256, 4096, 4096, MIDDLE),
    (80, 4096, 4096, 4096, LARGE),
    (80, 16384, 28672, 8192, LARGE),
    (86, 1, 11008, 4096, SMALL),
    (86, 4096, 11008, 4096, LARGE),
    (89, 8, 4096, 11008, SMALL),
    (89, 2048, 4096, 11008, LARGE),
    (90, 1, 4096, 4096, SMALL),
    (90, 64, 4096, 4096, SHORT),
    (90, 128, 4096, 4096, PINGPONG),
    (90, 4096, 4096, 4096, COOPERATIVE),
    (90, 16384, 28672, 8192, COOPERATIVE),
    (100, 1, 4096, 4096, SMALL),
    (100, 4096, 4096, 4096, LARGE),
]


@pytest.mark.parametrize(("sm", "m", "n", "k", "name"), PINNED)
def test_choice_is_pinned_by_name(sm: int, m: int, n: int, k: int, name: str) -> None:
    assert chosen(sm, m, n, k)[0] == name


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"x_align": 8}, ANY),
        ({"w_align": 1}, ANY),
        ({"out_align": 2}, COOPERATIVE),
        ({"w": "s4"}, ANY),
        ({"x": "u8"}, ANY),
        ({"group_size": 128}, ANY),
        ({"k": 4095, "ldx": 4096, "ldw": 4096}, COOPERATIVE),
    ],
)
def test_choice_on_hopper_follows_types_and_memory(more: dict, name: str) -> None:
    got = native.select({"m": 4096, "n": 4096, "k": 4096, "out": "f16", **more}, DEVICES[90], only_compiled=False)[0]
    assert got == name


def test_every_row_is_reachable() -> None:
    reached = set()
    for sm in DEVICES:
        for m in (1, 32, 64, 300, 4096):
            for out in ("f16", "bf16", "f32", "s32", "s8"):
                reached.add(chosen(sm, m, 4096, 4096, out=out)[0])
                reached.add(chosen(sm, m, 4096, 4096, out=out, x_align=1)[0])
    assert reached == set(ROWS)


def test_one_row_or_every_refusal_for_random_problems() -> None:
    count = 2000
    nothing = 0
    for index in range(count):
        draw = Draw(BASE_SEED, "select", index)
        sm = draw.choice((75, *DEVICES))
        k = draw.choice((0, 16, 520, 4096, 65793, 65794, 131071, 131072, 200000))
        problem = {
            "m": draw.integer(0, 5000), "n": draw.integer(0, 20000), "k": k,
            "x": draw.choice(("s8", "s8", "u8", "s4")), "w": draw.choice(("s8", "s4")),
            "out": draw.choice(("f16", "bf16", "f32", "s32", "s8", "u8")),
            "x_align": draw.choice((1, 8, 16, 16)), "has_zero_point": draw.chance(0.5),
            "group_size": draw.choice((0, 0, 0, 16, 48)),
        }  # fmt: skip
        device = {"sm": sm, "sm_count": 100}
        name, cost, refusals = native.select(problem, device, only_compiled=False)
        accepted = [row for row in ROWS if native.refusal(row, problem, device, False)[0]]
        assert set(refusals) == set(ROWS) - set(accepted), f"index {index} seed {BASE_SEED}"
        if name is None:
            nothing += 1
            assert not accepted
            assert all(any(ch.isdigit() for ch in text) for text in refusals.values()), refusals
        else:
            assert cost == min(native.cost_us(row, problem, device) for row in accepted)
            assert name in accepted
    assert 0 < nothing < count


@pytest.mark.parametrize(
    ("x", "w", "zero_point", "bound"),
    [
        ("s8", "s8", False, 131071), ("s8", "s4", False, 2097151), ("s4", "s4", False, 33554431),
        ("u8", "s8", False, 65793), ("s8", "s8", True, 65793), ("u8", "s8", True, 65793),
    ],
)  # fmt: skip
def test_k_is_taken_up_to_its_bound_and_not_beyond(x: str, w: str, zero_point: bool, bound: int) -> None:
    problem = {"m": 8, "n": 8, "x": x, "w": w, "has_zero_point": zero_point, "out": "f32"}
    assert native.k_bound(problem) == bound
    assert native.refusal(ANY, problem | {"k": bound}, DEVICES[90], False)[0]
    ok, wanted, got, _ = native.refusal(ANY, problem | {"k": bound + 1}, DEVICES[90], False)
    assert (ok, wanted, got) == (False, bound, bound + 1)


# The goal is no step above 1.3 times. Known exceptions, by the model: M where one more row starts a tile of rows
# in a problem that the tensor cores bound (large N). The remedy would be a second launch for the rows beyond the
# tile. The lists are exact, so that a step that goes away is taken off them.
CLIFFS: dict[int, set[int]] = {80: {129}, 86: {65, 129}, 89: set(), 90: {65, 129}, 100: {33, 65, 129}}


@pytest.mark.parametrize("sm", DEVICES)
def test_predicted_cost_has_no_cliff_between_neighbouring_m(sm: int) -> None:
    worst = {}
    for n in (256, 1024, 4096, 8192, 11008, 28672):
        for k in (256, 1024, 4096, 8192):
            costs = [chosen(sm, m, n, k)[1] for m in range(1, 131)]
            for m in range(2, 131):
                ratio = costs[m - 1] / costs[m - 2]
                assert ratio > 0.99, f"sm {sm} N {n} K {k}: M = {m} is cheaper than {m - 1}"
                if ratio > 1.3:
                    worst[m] = max(worst.get(m, 0.0), ratio)
    assert set(worst) == CLIFFS[sm], worst
    assert all(ratio < 2.0 for ratio in worst.values()), worst


def test_the_cost_of_a_larger_problem_is_not_smaller() -> None:
    for row in ROWS:
        base = {"m": 100, "n": 1000, "k": 1008, "out": ROWS[row]["out"][0]}
        for more in ({"m": 101}, {"n": 1001}, {"k": 1024}):
            assert native.cost_us(row, base | more, DEVICES[90]) >= native.cost_us(row, base, DEVICES[90])
