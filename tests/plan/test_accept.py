"""What rows take and refuse: complete answers, with both numbers, and K up to its bound."""

from __future__ import annotations

import pytest
from images import as_images
from problems import BASE_SEED, Draw

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

ROWS = {row["name"]: row for row in native.kernel_table()}
SELECTABLE = {name for name, row in ROWS.items() if row["selectable"]}
ANY = "gemm_simt_any"
SMS = (75, 80, 86, 89, 90, 100, 120)


def random_problem(index: int) -> tuple[dict, dict]:
    """A problem and a device; most problems have something that some row refuses."""
    draw = Draw(BASE_SEED, "plan", index)
    x = draw.choice(("s8", "s8", "s8", "u8", "s4", "f16", "bf16"))
    problem = {
        "m": draw.integer(0, 5000) if draw.chance(0.5) else draw.integer(0, 40),
        "n": draw.integer(0, 20000),
        "k": draw.choice((0, 16, 128, 520, 4096, 65793, 65794, 131071, 131072, 200000)),
        "x": x,
        "w": draw.choice(("s8", "s4", x)),
        "out": draw.choice(("f16", "bf16", "f32", "s32", "s8", "s4", "u8")),
        "x_packed": x == "s4" and draw.chance(0.3),
        "w_layout": draw.choice(("natural", "natural", "blocked128")),
        "x_align": draw.choice((1, 8, 16, 16, 16)),
        "w_align": draw.choice((8, 16, 16, 16)),
        "out_align": draw.choice((2, 16)),
        "has_zero_point": draw.chance(0.5),
        "has_w_zero_point": draw.chance(0.1),
        "group_size": draw.choice((0, 0, 0, 16, 48, 64, 128)),
        "step_size": draw.choice((0, 0, 0, 0, 16, 64, 128)),
    }
    if problem["w"] in ("u8",):
        problem["w"] = "s8"
    return problem, {"sm": draw.choice(SMS), "sm_count": draw.choice((1, 60, 132))}


def test_one_row_or_every_refusal_for_random_problems() -> None:
    count = 10000
    nothing, chosen = 0, set()
    for index in range(count):
        problem, device = random_problem(index)
        name, cost, refusals = native.select(problem, device, only_compiled=False)
        where = f"index {index} seed {BASE_SEED}"
        assert set(refusals) <= SELECTABLE, where
        accepted = SELECTABLE - set(refusals)
        if name is None:
            nothing += 1
            assert not accepted, where
            assert all(any(ch.isdigit() for ch in text) for text in refusals.values()), refusals
        else:
            chosen.add(name)
            assert name in accepted, where
            assert cost > 0, where
        if index % 20 == 0:  # the answers of single rows are the same
            for row in SELECTABLE:
                assert native.refusal(row, problem, device, False)[0] == (row in accepted), where
            if name is not None:
                assert cost == min(native.cost_us(row, problem, device) for row in accepted), where
    assert 0 < nothing < count
    assert len(chosen) >= min(4, len(SELECTABLE))


@pytest.mark.parametrize(
    ("x", "w", "zero_point", "bound"),
    [
        ("s8", "s8", False, 131071),
        ("s8", "s4", False, 2097151),
        ("s4", "s4", False, 33554431),
        ("u8", "s8", False, 65793),
        ("s8", "s8", True, 65793),
        ("u8", "s8", True, 65793),
    ],
)
def test_k_is_taken_up_to_its_bound_and_not_beyond(x: str, w: str, zero_point: bool, bound: int) -> None:
    problem = {"m": 8, "n": 8, "x": x, "w": w, "has_zero_point": zero_point, "out": "f32"}
    device = {"sm": 90, "sm_count": 132}
    assert native.k_bound(problem) == bound
    assert native.refusal(ANY, problem | {"k": bound}, device, False)[0]
    ok, wanted, got, _ = native.refusal(ANY, problem | {"k": bound + 1}, device, False)
    assert (ok, wanted, got) == (False, bound, bound + 1)


def test_steps_bound_k_as_int8_weights_do() -> None:
    problem = {"m": 8, "n": 8, "x": "s8", "w": "s4", "out": "f32", "step_size": 1}
    device = {"sm": 90, "sm_count": 132}
    for zero_point, bound in ((False, (2**31 - 1) // (128 * 127)), (True, (2**31 - 1) // (255 * 127))):
        asked = problem | {"has_zero_point": zero_point}
        assert native.k_bound(asked) == bound
        assert native.refusal(ANY, asked | {"k": bound}, device, False)[0]
        assert not native.refusal(ANY, asked | {"k": bound + 1}, device, False)[0]


def test_rows_whose_accumulator_holds_a_multiple_have_a_smaller_bound() -> None:
    for name, row in ROWS.items():
        if "s32" not in row["out"] or row["groups_only"]:
            continue
        x, w = row["x"][0], row["w"][0]
        problem = {
            "m": 1,
            "n": 64,
            "x": x,
            "w": w,
            "out": "s32",
            "x_packed": row["x_packing"] == "nibbles",
            "w_layout": row["w_layouts"][0],
            "step_size": row["step_multiple"] if row["steps_only"] else 0,
            "experts": 5 if row["experts_only"] else 0,
        } | as_images(row, 1, 64)
        device = {"sm": row["sm_min"], "sm_count": 100}
        bound = native.k_bound(problem) // row["acc_scale"]
        step = max(row["k_multiple"], problem["step_size"])
        assert native.refusal(name, problem | {"k": bound // step * step}, device, False)[0], name
        assert not native.refusal(name, problem | {"k": (bound // step + 1) * step}, device, False)[0], name


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_fact_of_a_row_is_enforced(name: str) -> None:
    row = ROWS[name]
    device = {"sm": row["sm_min"], "sm_count": 100}
    k = max(256, 2 * row["group_multiple"])
    good = {
        "m": 1,
        "n": 256,
        "k": k,
        "x": row["x"][0],
        "w": row["w"][0],
        "out": row["out"][0],
        "x_packed": row["x"][0] == "s4" and row["x_packing"] == "nibbles",
        "w_layout": row["w_layouts"][0],
        "group_size": row["group_multiple"] if row["groups_only"] else 0,
        "step_size": row["step_multiple"] if row["steps_only"] else 0,
        "experts": 5 if row["experts_only"] else 0,
    } | as_images(row, 1, k)
    if row["groups_only"]:
        good["out"] = "f16"

    def takes(device: dict = device, **change: object) -> bool:
        return native.refusal(name, good | change, device, False)[0]

    assert takes(), native.refusal(name, good, device, False)
    assert not takes(device | {"sm": row["sm_min"] - 1})
    assert not takes(device | {"sm": row["sm_end"]})
    assert not takes(out="u8")
    for key, limit in (("x_align", row["x_align"]), ("w_align", row["w_align"]), ("out_align", row["out_align"])):
        assert limit == 1 or not takes(**{key: limit // 2})
    assert row["k_multiple"] == 1 or not takes(k=k + row["k_multiple"] // 2)
    assert takes(k=row["k_least"]) or row["groups_only"] or row["steps_only"]
    assert row["k_least"] == 0 or not takes(k=row["k_least"] - 1)
    assert row["m_max"] == 0 or (takes(m=row["m_max"]) and not takes(m=row["m_max"] + 1))
    assert takes(has_zero_point=True) == row["zero_point"]
    assert takes(has_w_zero_point=True) == row["w_zero_point"]
    if row["group_multiple"] == 0:
        assert not takes(group_size=128)
    elif row["group_multiple"] > 1:
        assert not takes(group_size=row["group_multiple"] // 2, out="f16")
    if step := row["group_step"]:
        assert takes(group_size=step // 2, k=6 * step)
        assert takes(group_size=3 * step, k=6 * step)
        assert not takes(group_size=step * 3 // 4, k=6 * step)
    if row["groups_only"]:
        assert not takes(group_size=0)
    images = as_images({"channel_multiple": 16}, 1, k)["image"]
    assert takes(image=images) == (row["channel_multiple"] > 0)
    assert takes(image=images | {"channels": 0}) != (row["channel_multiple"] > 0)
    if row["channel_multiple"]:
        assert not takes(image=images | {"channels": row["channel_multiple"] // 2})
        assert takes(image=images | {"image_step": 2**35 // 16 * 16})
        assert not takes(image=images | {"image_step": 2**35 + 16})
    assert takes(experts=1) == row["experts_only"]
    assert takes(experts=0) != row["experts_only"]
    if row["steps_only"]:
        assert not takes(step_size=0)
    if row["step_multiple"] == 0:
        assert not takes(step_size=128)
    else:
        assert takes(step_size=row["step_multiple"], w="s4")
        assert row["step_multiple"] == 1 or not takes(step_size=row["step_multiple"] // 2, w="s4")
        assert not takes(step_size=256 // 3, w="s4")
        assert not takes(step_size=64, w="s4", group_size=64)
        assert not takes(step_size=64, w="s8")
    for layout in {"natural", "blocked128"} - set(row["w_layouts"]):
        assert not takes(w_layout=layout)
