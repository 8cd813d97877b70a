"""Quantisers over the value catalogue at every granularity, against float64 references (docs/numerics.md 2)."""

from __future__ import annotations

import math

import accept
import brute
import laws
import problems
import pytest
import torch

from pyquant import numerics
from pyquant.errors import ArgumentError

SEEDS = range(problems.BASE_SEED, problems.BASE_SEED + 6)


@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
@pytest.mark.parametrize("values", problems.VALUES, ids=lambda v: v.name)
class TestCatalogue:
    def test_dynamic(self, values, granularity):
        for seed in SEEDS:
            laws.quantize_dynamic(numerics, values, granularity, seed)

    def test_static(self, values, granularity):
        for seed in SEEDS:
            laws.quantize(numerics, values, granularity, seed)


@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
def test_dequantize(granularity):
    for seed in range(problems.BASE_SEED, problems.BASE_SEED + 150):
        laws.dequantize(numerics, granularity, seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("qmin", "qmax"), [(-127, 127), (-128, 127), (-7, 7), (-8, 7)])
@pytest.mark.parametrize("scale", problems.STATIC_SCALES)
def test_every_16_bit_input_has_the_right_code(dtype, qmin, qmax, scale):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for zero_point in (None, torch.tensor([qmin]), torch.tensor([qmax]), torch.tensor([3])):
        zero_point = None if zero_point is None else zero_point.to(torch.int32)
        args = (x, torch.tensor([scale]), zero_point, "per_tensor", 0, qmin, qmax)
        accept.t0(numerics.quantize(*args), brute.quantize(*args), what=f"{scale} {zero_point}", waiver="all inputs")


@pytest.mark.parametrize("layout", problems.layouts(), ids=lambda x: x.name)
@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
def test_layout_does_not_matter(layout, granularity):
    x = layout.build(problems.Draw(problems.BASE_SEED, "layout").normal(6, 12))
    group = 4 if granularity == "per_group" else 0
    plain = x.detach().clone(memory_format=torch.contiguous_format).as_subclass(torch.Tensor)
    with torch.no_grad():
        got = numerics.quantize_dynamic(x, granularity, group, False, -128, 127)
    want = numerics.quantize_dynamic(plain, granularity, group, False, -128, 127)
    assert got[0].is_contiguous()
    for a, b in zip(got, want, strict=True):
        (accept.t1 if b.is_floating_point() else accept.t0)(a.as_subclass(torch.Tensor), b, waiver="layouts")


def test_rounding_is_half_to_even():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5])
    assert numerics.quantize(x, torch.tensor([1.0])).tolist() == [0, 2, 2, 0, -2, -2, 126, -126]


def test_code_uses_the_reciprocal_and_not_a_division():
    # 1/scale rounded to float32, then multiplied, gives 0.5 exactly or just below: the codes of the two forms differ
    scale, found = torch.tensor([1.0]), 0
    draw = problems.Draw(7, "reciprocal")
    for _ in range(200):
        scale = draw.uniform(1) + 0.01
        x = (draw.codes(-100, 100, 4000).float() + 0.5) * scale
        want = brute.quantize(x, scale, None, "per_tensor", 0, -127, 127)
        accept.t0(numerics.quantize(x, scale), want)
        found += int((torch.round(x / scale).to(torch.int8) != want).sum())
    assert found > 0, "the data cannot tell the two forms apart"


@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
@pytest.mark.parametrize("shape", [(0,), (5,), (0, 8), (3, 0), (0, 0), (2, 3, 8), (2, 0, 8), (1, 2, 1, 3, 8)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_any_rank_and_zero_size(shape, granularity, symmetric):
    group = {"per_group": 4 if shape[-1] % 4 == 0 else 1}.get(granularity, 0)
    x = problems.Draw(3, shape).normal(*shape)
    q, scale, zero_point = numerics.quantize_dynamic(x, granularity, group, symmetric, -128, 127)
    want = brute.quantize_dynamic(x, granularity, group, symmetric, -128, 127)
    for a, b in zip((q, scale, zero_point), want, strict=True):
        (accept.t1 if b.is_floating_point() else accept.t0)(a, b, waiver="small")
    assert numerics.dequantize(q, scale, zero_point, granularity, group).shape == shape


def test_poisoned_row_is_nan_and_the_others_are_untouched():
    x = problems.Draw(5, "poison").normal(6, 20)
    clean = numerics.quantize_dynamic(x)
    for value in (math.nan, math.inf, -math.inf):
        for at in (0, 10, 19):
            broken = x.clone()
            broken[2, at] = value
            q, scale, _ = numerics.quantize_dynamic(broken)
            others = [0, 1, 3, 4, 5]
            assert scale[2].isnan()
            assert q[2].count_nonzero() == 0
            accept.t0(q[others], clean[0][others])
            accept.t1(scale[others], clean[1][others])
            real = numerics.dequantize(q, scale, granularity="per_token")
            assert real[2].isnan().all()
            assert real[others].isfinite().all()


@pytest.mark.parametrize(
    ("granularity", "group_size", "argument"),
    [
        ("per_row", 0, "granularity"),
        ("per_group", 0, "group_size"),
        ("per_group", 5, "group_size"),
        ("per_group", -4, "group_size"),
        ("per_token", 4, "group_size"),
        ("per_tensor", 8, "group_size"),
    ],
)
def test_what_has_no_meaning_is_refused(granularity, group_size, argument):
    with pytest.raises(ArgumentError) as caught:
        numerics.quantize_dynamic(torch.zeros(3, 8), granularity, group_size)
    assert caught.value.argument == argument
