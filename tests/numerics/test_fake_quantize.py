"""The specification of fake quantisation against float64, bit by bit (docs/numerics.md 10)."""

from __future__ import annotations

import fake_laws
import laws
import problems
import pytest
import torch

from pyquant import numerics

SEEDS = range(problems.BASE_SEED, problems.BASE_SEED + 2)


@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
def test_catalogue(granularity):
    for seed in SEEDS:
        for values in problems.VALUES:
            fake_laws.catalogue(numerics, values, granularity, seed)


@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
def test_normal_numbers_and_gradients(granularity):
    for seed in range(problems.BASE_SEED, problems.BASE_SEED + 6):
        fake_laws.normal(numerics, granularity, seed)
        fake_laws.backward(numerics, granularity, seed)


def test_the_sum_has_one_order():
    fake_laws.sums(numerics, problems.BASE_SEED)


def test_a_mask_travels_through_its_bytes():
    draw = problems.Draw(problems.BASE_SEED, "mask")
    for shape in ((0,), (1,), (8,), (3, 5), (2, 3, 17)):
        bits = draw.uniform(*shape) > 0.5
        mask = numerics.pack_mask(bits)
        assert mask.shape == ((bits.numel() + 7) // 8,)
        assert torch.equal(numerics.unpack_mask(mask, shape), bits)


def test_the_straight_through_gradient_is_that_of_the_detach_recipe():
    """y = x + (fq(x) - x).detach() inside the range, a constant outside: what papers write down."""
    draw = problems.Draw(problems.BASE_SEED, "recipe")
    x = draw.normal(6, 40).requires_grad_()
    scale = torch.tensor([1.5 / 127])
    v = (x / scale).clamp(-127, 127)
    ((v + (v.round() - v).detach()) * scale).backward(weights := draw.normal(6, 40))
    _, mask = numerics.fake_quantize(x.detach(), scale)
    at_limit = ((x / scale).abs() - 127).abs() < 0.51  # the recipe cuts at 127, ours at 127.5
    got = numerics.fake_quantize_backward(weights, mask)
    assert torch.allclose(got[~at_limit], x.grad[~at_limit], rtol=1e-6, atol=0)
    assert int(at_limit.sum()) < 5
