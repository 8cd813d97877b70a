"""Accumulator bounds: exact at the largest K with the worst data, refused one beyond (docs/numerics.md 3)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyquant import numerics
from pyquant.core.bounds import INT32_MAX, UNBOUNDED, check_k, k_max, k_max_affine
from pyquant.errors import ArgumentError

S8, S8_NARROW, U8, S4 = (-128, 127), (-127, 127), (0, 255), (-8, 7)
# x range, w range, largest K, largest K with a zero point
PAIRS = [
    (S8, S8, 131_071, 65_793),
    (S8_NARROW, S8_NARROW, 133_144, 66_572),
    (S8, S8_NARROW, 132_104, 66_311),
    (U8, S8, 65_793, 65_793),
    (S8, S4, 2_097_151, 1_052_688),
    (S4, S4, 33_554_431, 17_895_697),
]


def worst(x_range: tuple[int, int], w_range: tuple[int, int], zero_point: bool) -> tuple[int, int, int]:
    """Codes x, w and a zero point whose term (x - zero_point) * w is largest in absolute value."""
    offsets = x_range if zero_point else (0,)
    return max(((x, w, z) for x in x_range for w in w_range for z in offsets), key=lambda c: abs((c[0] - c[2]) * c[1]))


@pytest.mark.parametrize("zero_point", [False, True], ids=["product", "zero-point term"])
@pytest.mark.parametrize(("x_range", "w_range", "plain", "affine"), PAIRS)
def test_exact_at_the_bound_and_refused_beyond(x_range, w_range, plain, affine, zero_point):
    bound = affine if zero_point else plain
    x, w, z = worst(x_range, w_range, zero_point)
    assert abs((x - z) * w) * bound <= INT32_MAX < abs((x - z) * w) * (bound + 1)
    check_k(bound, x_range, w_range, has_zero_point=zero_point)
    with pytest.raises(ArgumentError, match=f"got {bound + 1}; allowed: at most {bound}") as caught:
        check_k(bound + 1, x_range, w_range, has_zero_point=zero_point)
    assert caught.value.argument == "K"
    x_type = torch.uint8 if x_range == U8 else torch.int8
    x_q = torch.full((1, bound), x, dtype=x_type)
    w_q = torch.full((1, bound), w, dtype=torch.int8)
    acc = numerics.accumulate(x_q, w_q, torch.tensor(z) if zero_point else None)
    assert acc.item() == (x - z) * w * bound


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize(("x_range", "w_range", "plain", "affine"), PAIRS)
def test_both_terms_of_the_zero_point_correction_fit_too(x_range, w_range, plain, affine, zero_point):
    bound = affine if zero_point else plain
    for x in x_range:
        for w in w_range:
            assert abs(x * w) * bound <= INT32_MAX
            for z in x_range:
                assert not zero_point or abs(z * w) * bound <= INT32_MAX


def test_edges():
    assert k_max(0, 128) == k_max(128, 0) == UNBOUNDED
    assert k_max_affine(0, 0, 127) == UNBOUNDED
    check_k(0, S8, S8)
    with pytest.raises(ArgumentError):
        check_k(-1, S8, S8)


def test_documented_bounds_are_these():
    text = (Path(__file__).resolve().parents[2] / "docs" / "numerics.md").read_text()
    rows = [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith(("| int8 [", "| uint8 |", "| int4 ["))
    ]
    documented = {tuple(int(c.replace(" ", "")) for c in row[2:]) for row in rows}
    assert documented == {(plain, affine) for _, _, plain, affine in PAIRS}
