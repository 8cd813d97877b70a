"""The Hadamard transform against scalar float32 sums in the stated order, and its matrices against their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pyquant import ops
from pyquant.errors import ArgumentError
from pyquant.numerics.hadamard import (
    BASE_MATRICES,
    base_of,
    hadamard_transform,
    largest_block,
    power_scale,
    sums,
)

ORDERS = [1, 2, 8, 64, 128, 256, 1024, 12, 24, 96, 20, 40, 28, 56, 12 << 8]


def stated(row: np.ndarray, order: int, scale: float | None = None) -> np.ndarray:
    """docs/numerics.md 15, one block at a time, one sum at a time."""
    base = base_of(order)
    twos, result = order // base, []
    for block in row.reshape(-1, order):
        t = [np.float32(-v if (i & i >> 1).bit_count() % 2 else v) for i, v in enumerate(block)]
        if base > 1:
            signs, runs = BASE_MATRICES[base], np.array(t, np.float32).reshape(base, twos)
            out = []
            for b in range(base):
                signed = [np.float32(signs[a][b]) * runs[a] for a in range(base)]
                fours = [(signed[a] + signed[a + 1]) + (signed[a + 2] + signed[a + 3]) for a in range(0, base, 4)]
                total = fours[0]
                for four in fours[1:]:
                    total = total + four
                out.append(total)
            t = list(np.concatenate(out))
        distances = [2**k for k in range(14, -1, -1) if 2**k < twos]
        for late in (256, 128):  # after 16
            if late in distances:
                distances.remove(late)
                distances.insert(distances.index(16) + 1 + (late == 128 and 256 in distances), late)
        for step in distances:
            for i in range(order):
                if i // step % 2 == 0:
                    t[i], t[i + step] = t[i] + t[i + step], t[i] - t[i + step]
        factor = np.float32(1 / np.sqrt(float(order)) if scale is None else scale)
        result += [np.float32(v) * factor + np.float32(0) for v in t]
    return np.array(result, np.float32)


@pytest.mark.parametrize("order", ORDERS)
def test_the_bits_are_those_of_the_stated_order(order) -> None:
    x = torch.randn(3, 3 * order, generator=torch.Generator().manual_seed(order)) * 100
    want = np.stack([stated(row, order) for row in x.numpy()])
    assert np.array_equal(hadamard_transform(x, order).numpy().view(np.int32), want.view(np.int32))
    scaled = np.stack([stated(row, order, 0.3) for row in x[:1].numpy()])
    assert np.array_equal(hadamard_transform(x[:1], order, 0.3).numpy().view(np.int32), scaled.view(np.int32))
    for dtype in (torch.float16, torch.bfloat16):
        narrow = x.to(dtype)
        assert torch.equal(hadamard_transform(narrow, order), hadamard_transform(narrow.float(), order).to(dtype))


@pytest.mark.parametrize("order", ORDERS)
def test_matrices_are_hadamard_and_kronecker_products(order) -> None:
    matrix = sums(torch.eye(order, dtype=torch.float64), order)
    assert torch.equal(matrix.abs(), torch.ones(order, order).double())
    assert torch.equal(matrix @ matrix.mT, order * torch.eye(order).double())
    base = base_of(order)
    bits = torch.tensor([[(i & j).bit_count() for j in range(order // base)] for i in range(order // base)])
    assert torch.equal(matrix, torch.kron(torch.tensor(BASE_MATRICES[base]).double(), (-1.0) ** bits.double()))


@pytest.mark.parametrize("order", [16, 256, 512, 4096, 48, 96, 160, 224, 14336])
def test_a_mean_that_all_channels_share_is_spread(order) -> None:
    """Behind a GELU every channel has one; without the signs it is sqrt(order) times as large in the first channel."""
    assert float(hadamard_transform(torch.ones(1, order), order).abs().max()) < 3.5


def test_many_rows_are_their_rows() -> None:
    """Beyond what a cache holds the rows are taken in parts."""
    x = torch.randn(3, 100, 2 * 448, generator=torch.Generator().manual_seed(2))
    assert x.numel() > 1 << 17
    assert torch.equal(hadamard_transform(x, 448)[2, 99], hadamard_transform(x[2, 99], 448))
    assert hadamard_transform(x[:0], 448).shape == (0, 100, 896)


def test_orders_that_there_are() -> None:
    known = {2**k * m for k in range(9) for m in (1, 12, 20, 28)}
    assert {n for n in range(1, 200) if base_of(n) is not None} == {n for n in known if n < 200}
    assert base_of(0) is None
    for columns in range(1, 400):
        assert largest_block(columns) == max(n for n in known if columns % n == 0)
    with pytest.raises(ValueError, match="order 6"):
        sums(torch.zeros(6), 6)


@pytest.mark.parametrize("scale", [None, 0.75])
def test_gradients_are_those_of_a_linear_map(scale) -> None:
    x = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: hadamard_transform(t, 12, scale), x)


def test_the_op_has_the_gradient_of_the_specification() -> None:
    x, weights = torch.randn(3, 48), torch.randn(3, 48)
    for block, scale in ((16, None), (24, 0.5), (48, None)):
        gradients = []
        for function in (hadamard_transform, ops.hadamard_transform):
            leaf = x.clone().requires_grad_()
            gradients.append(torch.autograd.grad((function(leaf, block, scale) * weights).sum(), leaf)[0])
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_scales_that_there_are() -> None:
    """The power of two next to 1 / sqrt(n); what float32 has not, no op takes."""
    for order in (1, 2, 4, 12, 20, 28, 4096, 14336, 32768):
        scale = power_scale(order)
        assert math.frexp(scale)[0] == 0.5
        assert 2**-0.5 <= scale * order**0.5 <= 2**0.5
    x = torch.ones(2, 16)
    for scale in (0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60):
        for op in (ops.hadamard_transform, lambda x, block, scale: ops.hadamard_quantize(x, block, scale=scale)):
            for device in ("cpu", "meta"):
                with pytest.raises(ArgumentError, match=r"'scale'.*above 0 that float32 has"):
                    op(x.to(device), 16, scale)
    codes, scales, _ = ops.hadamard_quantize(x, 16, scale=2.0)
    want, ones, _ = ops.hadamard_quantize(x, 16, scale=0.5)
    assert torch.equal(codes, want)
    assert torch.equal(scales, 4 * ones)
