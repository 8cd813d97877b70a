"""Group scales of two levels: the split of the scales, the protected range, the search, and the product."""

from __future__ import annotations

from fractions import Fraction

import accept
import pytest
import torch

from pyquant import numerics
from pyquant.numerics.two_level import BASE_BITS, whole_base


@pytest.mark.parametrize(("qmin", "qmax"), [(-7, 7), (-8, 7), (-3, 3), (-1, 1), (-2, 1), (-63, 63)])
def test_the_protected_range_is_tight(qmin: int, qmax: int) -> None:
    largest = numerics.largest_step(qmin, qmax)
    assert max(-qmin, qmax) * largest <= 127 < max(-qmin, qmax) * (largest + 1)


def test_a_base_times_any_step_is_exact() -> None:
    base = whole_base(torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 2.0**-30 + 2.0**-60)
    steps = torch.arange(1, 128)
    exact = base.double()[:, None] * steps
    assert torch.equal(base[:, None] * steps.float(), exact.float())
    assert torch.equal(exact.float().double(), exact)
    assert bool(((whole_base(torch.rand(4096) + 1) - 1) * 2.0 ** (BASE_BITS - 1) % 1 == 0).all())


def _largest_base(row: list[float], largest: int) -> Fraction | None:
    """By trial, in rational numbers."""
    scales = [Fraction(s) for s in row]
    for count in range(1, largest + 1):
        base = min(scales) / count
        if Fraction(float(torch.tensor(float(base)))) != base:
            continue
        if all((s / base).denominator == 1 and s / base <= largest for s in scales):
            return base
    return None


def test_scales_are_split_into_the_largest_base_and_whole_steps() -> None:
    g = torch.Generator().manual_seed(1)
    base = whole_base(torch.rand(200, generator=g) + 2.0**-10)
    step = torch.randint(1, 19, (200, 5), generator=g)
    step[::7] = step[::7] // 6 * 6 + 6  # rows with a common divisor
    scale = base[:, None] * step.clamp(max=18).float()
    scale[::11, 2] *= 1 + 2.0**-20  # and rows that have no base
    found, steps = numerics.split_scales(scale, 18)
    want = [_largest_base(row.tolist(), 18) for row in scale]
    assert any(w is None for w in want)
    for b, s, w, row in zip(found.tolist(), steps.tolist(), want, scale.tolist(), strict=True):
        if w is None:
            assert b != b
        else:
            assert Fraction(b) == w
            assert [Fraction(x) / w for x in row] == s


def test_rows_without_scales_have_base_one() -> None:
    base, step = numerics.split_scales(torch.ones(3, 0), 18)
    assert base.tolist() == [1.0] * 3
    assert step.shape == (3, 0)


@pytest.mark.parametrize("limits", [(-7, 7), (-8, 7), (-3, 3)])
def test_the_search_takes_the_best_of_what_the_document_lists(limits: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(6, 24, generator=g) * torch.tensor([1.0, 0.1, 3.0]).repeat_interleave(8)
    weight[2, 8:16] = 0
    weight[3] = 0
    _, target, _ = numerics.quantize_dynamic(weight, "per_group", 8, True, *limits)
    scale = numerics.two_level_scales(weight, target, *limits)
    largest = numerics.largest_step(*limits)
    assert not bool(numerics.split_scales(scale, largest)[0].isnan().any())

    def error(row: int, group: int, one: float) -> float:
        w = weight[row, 8 * group : 8 * group + 8]
        real = numerics.dequantize(
            numerics.quantize(w, torch.tensor([one]), None, "per_tensor", 0, *limits), torch.tensor([one])
        )
        return float((real - w).double().square().sum())

    for row in range(6):
        t = torch.where(weight[row].reshape(3, 8).abs().amax(1) > 0, target[row], 0.0)
        errors = []
        for share in (1.0, 0.95, 0.9, 0.85, 0.8):
            base = whole_base((t.max() if t.max() > 0 else torch.tensor(float(largest))) * share / largest)
            steps = [[min(max(int(torch.ceil(x / base)) - i, 1), largest) for i in range(5)] for x in t]
            errors.append(sum(min(error(row, j, float(base * s)) for s in steps[j]) for j in range(3)))
        got = sum(error(row, j, float(scale[row, j])) for j in range(3))
        assert got <= min(errors) * (1 + 1e-5) + 1e-12


def test_two_levels_cost_little_beside_plain_groups() -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    _, target, _ = numerics.quantize_dynamic(weight, "per_group", 128, True, -7, 7)

    def error(scale: torch.Tensor) -> float:
        codes = numerics.quantize(weight, scale, None, "per_group", 128, -7, 7)
        return float((numerics.dequantize(codes, scale, None, "per_group", 128) - weight).square().mean().sqrt())

    two = error(numerics.two_level_scales(weight, target, -7, 7))
    assert two < 0.95 * error(target)  # the search clips what max-calibrated groups do not


def test_the_product_is_one_integer_sum_with_one_scale_a_channel() -> None:
    g = torch.Generator().manual_seed(4)
    codes = torch.randint(-7, 8, (9, 48), generator=g, dtype=torch.int8)
    codes[0] = 7
    base, step = whole_base(torch.rand(9, generator=g) + 0.1), torch.randint(1, 19, (9, 3), generator=g)
    step[:, 0], step[0] = 1, 18
    step[0, 0] = 17  # no common divisor
    x = torch.randint(-127, 128, (5, 48), generator=g, dtype=torch.int8)
    x_scale, zero = torch.rand(5, generator=g) + 0.1, torch.randint(-20, 20, (5,), generator=g, dtype=torch.int32)
    products, scale = numerics.one_level(codes, base[:, None] * step.float(), 18)
    accept.t1(scale, base)
    assert torch.equal(numerics.codes_of_products(products, base[:, None] * step.float(), 18), codes)
    spread = step.repeat_interleave(16, 1)
    acc = ((x.long() - zero.long()[:, None])[:, None] * (codes.long() * spread)).sum(-1)
    want = acc.to(torch.int32).float() * base * x_scale[:, None]
    accept.t1(numerics.gemm(x, products, scale, x_scale, zero), want)
