"""magnitude_histogram: the compiled op and the Python one against a loop over Python floats, and each other."""

from __future__ import annotations

import math

import pytest
import torch
from problems import BASE_SEED, Draw
from torch import Tensor

from pyquant import numerics, ops
from pyquant.errors import ArgumentError
from pyquant.numerics.histogram import BINS, EXPONENT_MAX, EXPONENT_MIN, MANTISSA_BITS, OCTAVES

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def by_hand(x: Tensor, exponent: int) -> Tensor:
    """Straight from the definition, with Python numbers: no bit patterns."""
    counts = [[0] * BINS, [0] * BINS]
    for value in x.reshape(-1).to(torch.float64).tolist():
        row = 0 if math.copysign(1, value) < 0 else 1
        magnitude = abs(value)
        if magnitude < 2.0 ** (exponent - OCTAVES):
            counts[row][0] += 1
        elif not magnitude < 2.0**exponent:
            counts[row][BINS - 1] += 1
        else:
            fraction, power = math.frexp(magnitude)  # fraction in [0.5, 1)
            octave = power - 1 - (exponent - OCTAVES)
            step = int((2 * fraction - 1) * 2**MANTISSA_BITS)
            counts[row][1 + octave * 2**MANTISSA_BITS + step] += 1
    return torch.tensor(counts)


def values(draw: Draw, dtype: torch.dtype) -> Tensor:
    x = draw.normal(23, 19) * torch.exp2(12 * draw.normal(23, 1)).clamp(2.0**-20, 2.0**14)
    x[0, :7] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1.0, -1.0, 2.0**-130])
    x[1, :4] = torch.tensor([2.0, 2.0 - 2.0**-11, 2.0 - 2.0**-22, 65504.0])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("exponent", [-6, 0, 1, 9, 16])
def test_counts_are_those_of_the_definition(dtype: torch.dtype, exponent: int) -> None:
    x = values(Draw(BASE_SEED, "histogram", exponent), dtype)
    want = by_hand(x, exponent)
    assert torch.equal(numerics.magnitude_histogram(x, exponent), want)
    assert torch.equal(ops.magnitude_histogram(x, exponent), want)
    assert want.sum() == x.numel()


@pytest.mark.parametrize("dtype", FLOATS)
def test_not_a_number_lands_in_the_last_bin(dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, 1.0], dtype=dtype)
    for op in (ops.magnitude_histogram, numerics.magnitude_histogram):
        assert op(x, 4)[:, BINS - 1].sum() == 1


@pytest.mark.parametrize("dtype", FLOATS)  # 16-bit ones are widened piece by piece
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (7, 5, 3), (40000,), (3, 700001), (1_100_000,)])
def test_any_shape_and_every_number_of_threads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = numerics.magnitude_histogram(x, 3)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(ops.magnitude_histogram(x, 3), want)
    finally:
        torch.set_num_threads(before)


def test_strided_memory_counts_the_same() -> None:
    base = torch.randn(64, 66)
    for x in (base.T, base[::2, 1:], base[:, ::3], base[:1].expand(5, 66), base[:, :0]):
        assert torch.equal(ops.magnitude_histogram(x, 2), numerics.magnitude_histogram(x.contiguous(), 2))


@pytest.mark.parametrize("exponent", [EXPONENT_MIN, EXPONENT_MAX])
def test_the_ends_of_the_range_of_exponents(exponent: int) -> None:
    x = torch.tensor([2.0**127, -(2.0**-101), 2.0**-121, 3e38, 0.0])
    assert torch.equal(ops.magnitude_histogram(x, exponent), by_hand(x, exponent))
    for beyond in (EXPONENT_MIN - 1, EXPONENT_MAX + 1):
        with pytest.raises(ArgumentError, match="exponent"):
            ops.magnitude_histogram(x, beyond)


@pytest.mark.parametrize("octaves", [0, 1, 7, OCTAVES, OCTAVES + 5])
def test_a_wider_window_only_moves_octaves_into_bin_zero(octaves: int) -> None:
    x = values(Draw(BASE_SEED, "widen"), torch.float32).clamp(-0.99, 0.99)
    narrow = numerics.magnitude_histogram(x, 0)
    assert torch.equal(numerics.widen_histogram(narrow, octaves), numerics.magnitude_histogram(x, octaves))


def test_edges_are_where_the_bins_change() -> None:
    edges = numerics.magnitude_edges(3)
    assert edges.numel() == BINS + 1
    assert bool((edges.diff() > 0).all())
    inner = edges[1:-1].to(torch.float32)  # every edge is a float32
    assert torch.equal(inner.double(), edges[1:-1])
    assert torch.equal(
        numerics.magnitude_histogram(inner, 3)[1], torch.cat([torch.zeros(1), torch.ones(BINS - 1)]).long()
    )
    below = torch.nextafter(edges[1:].to(torch.float32), torch.tensor(0.0))
    assert torch.equal(numerics.magnitude_histogram(below, 3)[1], torch.ones(BINS).long())
