"""fma and sqrt in plain torch against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from problems import BASE_SEED, Draw
from torch import Tensor

from pyquant.numerics.fp32 import fma, sqrt

COUNT = 6000


def rounded(value: Fraction) -> float:
    """value rounded to float32, half to even, by integer arithmetic alone."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    result = round(magnitude / step) * step  # Fraction rounds half to even
    return math.copysign(float(result) if result < Fraction(2) ** 128 else math.inf, value)


def any_finite(draw: Draw, count: int) -> Tensor:
    """Finite float32 with every bit pattern equally likely."""
    bits = torch.randint(-(2**31), 2**31, (2 * count,), generator=draw.generator).to(torch.int32)
    values = bits.view(torch.float32)
    return values[values.isfinite()][:count]


def integers(draw: Draw, low: int, high: int) -> Tensor:
    return torch.randint(low, high + 1, (COUNT,), generator=draw.generator, dtype=torch.int32)


def operands(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = Draw(BASE_SEED, "fma", kind)
    a, b, c = (any_finite(draw, COUNT) for _ in range(3))
    if kind == "patterns":
        return a, b, c
    if kind == "cancelling":  # c = -a*b up to a few ulps: the result is what fp32 multiplication lost
        a, b = draw.normal(COUNT), draw.normal(COUNT)
        c = -(a * b)
        return a, b, (c.view(torch.int32) + integers(draw, -2, 2)).view(torch.float32)
    if kind == "ties":  # a*b is half an ulp of c, or within 2^-23 of half an ulp: seen only with more than 53 bits
        c = integers(draw, 0x3F800000, 0x3FFFFFFF).view(torch.float32)
        half_ulp = torch.where(draw.uniform(COUNT) < 0.5, 2.0**-24, -(2.0**-24))
        nudge = 1 + integers(draw, -1, 1).float() * 2.0**-23
        return half_ulp * nudge, 1 + integers(draw, -1, 1).float() * 2.0**-23, c
    if kind == "subnormal":  # what the product loses lies around the smallest subnormal
        a, b = draw.normal(COUNT), draw.normal(COUNT) * 2.0 ** integers(draw, -124, -105).float()
        return a, b, -(a * b)
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["patterns", "cancelling", "ties", "subnormal"])
def test_rounds_once(kind: str) -> None:
    a, b, c = operands(kind)
    got = fma(a, b, c).tolist()
    want = [rounded(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())]
    assert len(set(want)) > COUNT // 100, "the operands cannot tell right from wrong"
    wrong = [i for i in range(len(want)) if got[i] != want[i]]
    first = wrong[0] if wrong else 0
    assert not wrong, f"{len(wrong)} of {len(want)}; fma({a[first]!r}, {b[first]!r}, {c[first]!r}) = {got[first]!r}"


@pytest.mark.parametrize("kind", ["cancelling", "ties", "subnormal"])
def test_operands_see_a_second_rounding(kind: str) -> None:
    """The cases have power: rounding the product first gives something else on many of them."""
    a, b, c = operands(kind)
    assert (a * b + c != fma(a, b, c)).float().mean() > 0.05


def test_double_rounding_through_float64_is_seen() -> None:
    """1 + 2^-24 + 2^-60 lies above a tie by less than float64 can tell."""
    c = torch.tensor([1 + 2.0**-23])
    a, b = torch.tensor([2.0**-24 * (1 + 2.0**-23)]), 1 - 2.0**-23  # just below half an ulp of c
    assert (a.double() * b + c.double()).float().item() == 1 + 2.0**-22, "a plain float64 sum must err here"
    assert fma(a, b, c).item() == 1 + 2.0**-23


def test_special_values() -> None:
    inf, nan = math.inf, math.nan
    cases = [
        (inf, 1.0, 1.0, inf),
        (inf, 0.0, 1.0, nan),
        (inf, 1.0, -inf, nan),
        (nan, 1.0, 1.0, nan),
        (3e38, 3e38, -inf, -inf),
        (3e38, 3e38, 0.0, inf),
        (1.0, -0.0, -0.0, -0.0),
        (1.0, -0.0, 0.0, 0.0),
        (1e-30, -1e-30, 0.0, -0.0),
    ]
    for a, b, c, want in cases:
        got = fma(torch.tensor(a), torch.tensor(b), torch.tensor(c)).item()
        same = (
            math.isnan(got) if math.isnan(want) else (got == want and math.copysign(1, got) == math.copysign(1, want))
        )
        assert same, f"fma({a}, {b}, {c}) = {got}, want {want}"


def test_broadcasts_and_takes_numbers() -> None:
    column, row = torch.arange(3.0)[:, None], torch.arange(4.0)
    assert torch.equal(fma(column, row, 0.5), column * row + 0.5)
    assert fma(torch.empty(0, 2), 1.0, 2.0).shape == (0, 2)


def test_sqrt_is_the_nearest_float32() -> None:
    x = any_finite(Draw(BASE_SEED, "sqrt"), COUNT).abs()
    x[:4] = torch.tensor([0.0, 2.0**-149, 2.0**127, 1.0])
    for value, root in zip(x.tolist(), sqrt(x).tolist(), strict=True):
        half = Fraction(math.ulp(root)) * 2**28  # math.ulp is float64's: 2^29 of them make one of float32
        low, high = (Fraction(root) - half) ** 2, (Fraction(root) + half) ** 2
        assert root == 0 == value or low <= Fraction(value) <= high, f"sqrt({value}) = {root}"
    assert sqrt(torch.tensor([-1.0, math.nan])).isnan().all()
    assert sqrt(torch.tensor([math.inf])).item() == math.inf
