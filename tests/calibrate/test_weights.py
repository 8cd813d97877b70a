"""Ranges of weights: each row against the same search on its own, and against brute force."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pyquant import numerics
from pyquant.calibrate import Range, range_to_qparams, short_rows, weight_range
from pyquant.calibrate.methods import mse
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError, SchemeError

METHODS = ("max", "percentile", "entropy", "mse")


def weight(n: int = 5, k: int = 96, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * torch.exp2(3 * torch.randn(n, 1, generator=g))
    w[0] = 0.0
    return w


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_granularities_are_the_same_search_on_other_rows(method: str, bits: int, symmetric: bool) -> None:
    w = weight()

    def of(x: torch.Tensor, granularity: str, group: int | None = None) -> Range:
        return weight_range(x, TensorScheme(bits, symmetric, granularity, group, calibrator=method, percentile=97.0))

    tensor, channel, group = of(w, "per_tensor"), of(w, "per_channel"), of(w, "per_group", 32)
    assert tensor.low.shape == ()
    assert channel.low.shape == (5,)
    assert group.low.shape == (5, 3)
    for n in range(5):
        row = of(w[n : n + 1], "per_tensor")
        assert torch.equal(row.low, channel.low[n])
        assert torch.equal(row.high, channel.high[n])
        for j in range(3):
            part = of(w[n : n + 1, 32 * j : 32 * j + 32], "per_channel")
            assert torch.equal(part.high[0], group.high[n, j])
    assert channel.amax[0] == 0
    assert bool((channel.amax[1:] > 0).all())
    if symmetric:
        assert bool((channel.amax <= w.abs().amax(1)).all())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("row", [256, 512])
def test_mse_is_at_most_what_a_dense_grid_finds(bits: int, symmetric: bool, row: int) -> None:
    """Rows that are rounded at every candidate, and those that are long enough for tables."""
    assert row == 256 or row > short_rows.LONGEST
    compare_with_a_dense_grid(bits, symmetric, row)


def compare_with_a_dense_grid(bits: int, symmetric: bool, row: int, narrow: bool = True) -> None:
    w = weight(6, row, seed=2)[1:]
    scheme = TensorScheme(bits, symmetric, "per_channel", calibrator="mse", narrow_range=narrow)

    def errors(chosen: Range) -> torch.Tensor:
        scale, zero_point = range_to_qparams(chosen, scheme)
        q = numerics.quantize(w, scale, zero_point, "per_channel", 0, *scheme.code_range)
        return (numerics.dequantize(q, scale, zero_point, "per_channel") - w).double().square().mean(1)

    got = errors(weight_range(w, scheme))
    low, high = torch.aminmax(w, dim=1)
    if symmetric:
        grid = torch.stack([errors(Range.symmetric(w.abs().amax(1) * i / 200)) for i in range(20, 201)])
    else:
        ends = [(a / 16, b / 16) for a in range(4, 17) for b in range(4, 17)]
        grid = torch.stack([errors(Range(low * a, high * b)) for a, b in ends])
    assert bool((got <= grid.amin(0) * (1.005 if bits == 4 else 1.05)).all())  # int8: 256 numbers make a rough valley
    assert bool((got <= errors(weight_range(w, TensorScheme(bits, symmetric, "per_channel"))) * 1.000001).all())


def test_mse_uses_the_code_that_only_one_sign_has() -> None:
    compare_with_a_dense_grid(4, True, 256, narrow=False)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("row", [1, 2, 31, 128, 256])
def test_short_rows_have_the_steps_of_the_tables(bits: int, row: int) -> None:
    w = weight(300, row, seed=row)
    w[1], w[2] = 1e-30, -1e30  # of one number; squares that float32 does not hold
    w[3, 1:] = 0.0
    scheme = TensorScheme(bits, granularity="per_channel", calibrator="mse")

    def shares() -> torch.Tensor:
        """Squared errors as shares of the squares."""
        scale = weight_range(w, scheme).amax[1:, None].double() / scheme.code_range[1]
        real = w[1:].double()
        rounded = (real / scale).round().clamp(*scheme.code_range) * scale
        return (rounded - real).square().sum(1) / real.square().sum(1)

    got = shares()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mse, "LONGEST", 0)
        want = shares()
    assert float(got.sum()) <= float(want.sum()) * 1.00001 + 1e-12
    assert bool((got <= want * 1.001 + 1e-12).all())
    assert bits < 8 or torch.equal(got, want)


@pytest.mark.parametrize("row", [32, 256])
def test_steps_of_short_rows_scale_with_the_row_and_keep_to_themselves(row: int) -> None:
    w = weight(5000 // row * 7, row, seed=3)
    step = partial(short_rows.least_squares_steps, qmin=-7, qmax=7, ratios=torch.exp2(-torch.arange(40).double() / 16))
    whole = step(w)
    assert torch.equal(step(w.flip(0)), whole.flip(0))
    assert torch.equal(step(w[5:6]), whole[5:6])
    assert torch.equal(step(w * 2.0**-60), whole * 2.0**-60)
    assert torch.equal(step(w.bfloat16()), step(w.bfloat16().float()))
    assert bool((whole <= w.abs().amax(1, keepdim=True).double() / 7).all())


def test_percentile_is_an_order_statistic() -> None:
    w = weight(4, 1000, seed=3)[1:]
    got = weight_range(w, TensorScheme(granularity="per_channel", calibrator="percentile", percentile=99.0)).amax
    assert torch.equal(got, w.abs().sort(1).values[:, 989])


@pytest.mark.parametrize("method", METHODS)
def test_rows_in_chunks_are_the_rows(method: str) -> None:
    w = weight(150, 24, seed=4)
    scheme = TensorScheme(4, granularity="per_channel", calibrator=method)
    whole = weight_range(w, scheme)
    assert torch.equal(whole.high[140:], weight_range(w[140:], scheme).high)


def test_wrong_weights_are_refused() -> None:
    channel = TensorScheme(granularity="per_channel")
    for bad in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(0, 4), [1.0]):
        with pytest.raises(ArgumentError, match="weight"):
            weight_range(bad, channel)
    with pytest.raises(NonFiniteError, match=r"\[1, 0\]"):
        weight_range(torch.tensor([[1.0], [torch.nan]]), channel)
    with pytest.raises(SchemeError, match="group_size"):
        weight_range(torch.ones(2, 10), TensorScheme(granularity="per_group", group_size=3))
    with pytest.raises(SchemeError, match="granularity"):
        weight_range(torch.ones(2, 10), TensorScheme(granularity="per_token"))
    with pytest.raises(ArgumentError, match="calibrator"):
        weight_range(torch.ones(2, 10), TensorScheme(calibrator="fixed"))
