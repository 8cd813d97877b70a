"""The Hadamard transform in blocks: which orders there are, their matrices, and the order of its sums."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from pyquant.numerics.quantize import quantize_dynamic

# The odd part of an order -> the order of the matrix that is not made of butterflies. Source: Paley, "On orthogonal
# matrices", Journal of Mathematics and Physics 12, 1933.
_BASES: Final = {1: 1, 3: 12, 5: 20, 7: 28}


def base_of(order: int) -> int | None:
    """Of an order m * 2^k the m among 1, 12, 20, 28; None where there is no such product."""
    odd = order // (order & -order) if order > 0 else 0
    base = _BASES.get(odd)
    return base if base is not None and order % base == 0 else None


def largest_block(columns: int) -> int:
    """The largest order that divides a number of columns > 0; 1 where it is odd."""
    twos = columns & -columns
    odds = [odd for odd, base in _BASES.items() if columns % (odd * twos) == 0 and odd * twos % base == 0]
    return max(odds) * twos


def _paley(order: int) -> tuple[tuple[int, ...], ...]:
    if order == 1:
        return ((1,),)
    q = {12: 11, 20: 19, 28: 13}[order]
    squares = {i * i % q for i in range(1, q)}

    def chi(i: int) -> int:
        return 0 if i % q == 0 else 1 if i % q in squares else -1

    if order == q + 1:  # his first construction: q = 3 (mod 4)
        core = [[1, *[1] * q], *([-1, *(chi(i - j) + (i == j) for j in range(q))] for i in range(q))]
        return tuple(map(tuple, core))
    conference = [[0, *[1] * q], *([1, *(chi(i - j) for j in range(q))] for i in range(q))]
    rows = []
    for i, row in enumerate(conference):  # his second: C x [1 1; 1 -1] + I x [1 -1; -1 -1]
        rows.append(tuple(v for j, c in enumerate(row) for v in (c + (i == j), c - (i == j))))
        rows.append(tuple(v for j, c in enumerate(row) for v in (c - (i == j), -c - (i == j))))
    return tuple(rows)


# rows of +1 and -1, orthogonal to each other: docs/numerics.md 15
BASE_MATRICES: Final = {order: _paley(order) for order in _BASES.values()}


_IN_CACHE: Final = 1 << 17  # numbers that all passes go over before the next ones


def sums(x: Tensor, order: int, transposed: bool = False) -> Tensor:
    """Every block of `order` neighbours in the last dimension times the matrix of +1 and -1, in x's own type.

    x [..., c * order]. Each sum of two is rounded by itself, in the order that docs/numerics.md 15 states. transposed:
    times the transpose of the matrix.
    """
    base = base_of(order)
    if base is None:
        raise ValueError(f"no Hadamard matrix of order {order}")
    rows = max(1, _IN_CACHE // order)
    if x.is_cpu and x.numel() > rows * order and not torch.compiler.is_compiling():
        parts = x.reshape(-1, order).split(rows)
        return torch.cat([_sums(part, order, base, transposed) for part in parts]).reshape(x.shape)
    return _sums(x, order, base, transposed)


def _sums(x: Tensor, order: int, base: int, transposed: bool) -> Tensor:
    twos = order // base
    t = x.reshape(-1, base, twos).permute(1, 2, 0).contiguous()  # a row of neighbours for each operand: whole vectors
    if base > 1:
        rows, matrix = t.unbind(0), BASE_MATRICES[base]
        t = torch.stack([_signed_sum(rows, signs) for signs in (matrix if transposed else zip(*matrix, strict=True))])
    step = twos // 2
    while step > 0:
        first, second = t.unflatten(1, (twos // (2 * step), 2, step)).unbind(2)
        t = torch.stack((first + second, first - second), 2).flatten(1, 3)
        step //= 2
    return t.permute(2, 0, 1).reshape(x.shape)


def hadamard_transform(x: Tensor, block: int) -> Tensor:
    """x [..., c * block] float, every `block` neighbours times diag(signs) and the orthogonal Hadamard matrix.

    -> the shape and type of x: computed in float32 (float64 for float64), rounded once to the type of x.
    Source: docs/numerics.md 15.
    """
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    given = wide.unflatten(-1, (-1, block)) * signs(block, x.device).to(wide.dtype)
    return (sums(given.flatten(-2), block) * (1.0 / math.sqrt(block))).to(x.dtype)


def hadamard_backward(grad: Tensor, block: int) -> Tensor:
    """The gradient of hadamard_transform: the transpose of its matrix, which is its inverse. Shape and type of grad."""
    wide = grad if grad.dtype == torch.float64 else grad.to(torch.float32)
    turned = sums(wide, block, transposed=True) * (1.0 / math.sqrt(block))
    return (turned.unflatten(-1, (-1, block)) * signs(block, grad.device).to(wide.dtype)).flatten(-2).to(grad.dtype)


def hadamard_quantize(
    x: Tensor, block: int, symmetric: bool = True, qmin: int = -127, qmax: int = 127
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_dynamic, per token, of hadamard_transform, which is not rounded to 16 bits in between."""
    turned = hadamard_transform(x.to(torch.float32), block)
    return quantize_dynamic(turned, "per_token", 0, symmetric, qmin, qmax)


def signs(order: int, device: torch.device) -> Tensor:
    """float32 [order] of +1 and -1: the Rudin-Shapiro sequence, whose own transform is flat. Without it the mean of the
    channels, which activations behind a ReLU or GELU have, would all go to the first of them: an outlier of sqrt(order)
    times its size. Source: Rudin, "Some theorems on Fourier coefficients", Proceedings of the AMS 10, 1959.
    """
    pairs = torch.arange(order, device=device)
    pairs = pairs & (pairs >> 1)
    for shift in (32, 16, 8, 4, 2, 1):  # the parity of the ones among the bits
        pairs = pairs ^ (pairs >> shift)
    return 1.0 - 2.0 * (pairs & 1)


def _signed_sum(rows: tuple[Tensor, ...], signs: tuple[int, ...]) -> Tensor:
    total = rows[0] if signs[0] > 0 else -rows[0]
    for row, sign in zip(rows[1:], signs[1:], strict=True):
        total = total + row if sign > 0 else total - row
    return total
