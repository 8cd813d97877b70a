"""Ranges to scales and zero points (docs/numerics.md 2.1)."""

from __future__ import annotations

import math

import accept
import brute
import problems
import pytest
import torch

from pyquant.numerics import qparams_from_range, scale_from_amax, scale_recip

FLOOR = 2.0**-100
TINY = [0.0, -0.0, 2.0**-149, 2.0**-126, FLOOR, FLOOR * (1 - 2.0**-24), FLOOR * (1 + 2.0**-23), FLOOR / 2, 1.1 * FLOOR]
ENDS = [*TINY, 1e-3, 0.5, 1.0, 127.0, 254.9, 1e30, torch.finfo(torch.float32).max, math.inf, math.nan]


@pytest.mark.parametrize("qmax", [1, 7, 127])
def test_scale_from_amax(qmax):
    amax = torch.cat([torch.tensor(ENDS), torch.exp2(problems.Draw(1, qmax).uniform(20_000) * 250 - 125)])
    want = brute.back([brute.scale_of_amax(a, qmax) for a in amax.double().tolist()])
    accept.t1(scale_from_amax(amax, qmax), want)


@pytest.mark.parametrize(("qmin", "qmax"), [(-128, 127), (-8, 7), (-127, 127), (0, 7)])
def test_qparams_from_range(qmin, qmax):
    draw = problems.Draw(2, qmin)
    ends = torch.tensor(ENDS + [-e for e in ENDS])
    low, high = (t.flatten() for t in torch.meshgrid(ends, ends, indexing="ij"))
    possible = ~(low > high)  # NaN included
    low, high = low[possible], high[possible]
    random = draw.normal(5_000, 2) * torch.exp2(draw.uniform(5_000, 1) * 240 - 120)
    ties = torch.exp2(draw.uniform(3_000) * 20 - 10)  # [-a, a]: low / scale lies at a half, up to rounding
    low, high = torch.cat([low, random.amin(1), -ties]), torch.cat([high, random.amax(1), ties])
    want = [brute.qparams_of_range(a, b, qmin, qmax) for a, b in zip(low.double().tolist(), high.double().tolist())]
    scale, zero_point = qparams_from_range(low, high, qmin, qmax)
    accept.t1(scale, brute.back([w[0] for w in want]))
    accept.t0(zero_point, torch.tensor([w[1] for w in want], dtype=torch.int32))
    poisoned = scale.isnan()
    assert bool((zero_point[poisoned] == 0).all())
    assert bool(((zero_point >= qmin) & (zero_point <= qmax))[~poisoned].all())


def test_zero_is_exact_in_every_affine_range():
    draw = problems.Draw(3, "zero")
    low, high = draw.normal(5_000), draw.normal(5_000)
    scale, zero_point = qparams_from_range(torch.minimum(low, high), torch.maximum(low, high), -128, 127)
    real = (zero_point - zero_point).float() * scale
    assert bool((real == 0).all())
    assert bool((scale > 0).all())


def test_recip_is_an_ieee_division():
    scale = torch.exp2(problems.Draw(4, "recip").uniform(1_000_000) * 200 - 100)
    accept.t1(scale_recip(scale), brute.back(1 / brute.wide(scale)))
