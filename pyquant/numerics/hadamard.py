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
        matrix = BASE_MATRICES[base]
        t = _base_sums(t.unbind(0), matrix if transposed else tuple(zip(*matrix, strict=True)))
    for bit in steps(twos):
        first, second = t.unflatten(1, (-1, 2, 1 << bit)).unbind(2)
        t = torch.stack((first + second, first - second), 2).flatten(1, 3)
    return t.permute(2, 0, 1).reshape(x.shape)


def steps(twos: int) -> tuple[int, ...]:
    """Of 2^k numbers the k steps, as the logarithms of their distances, in the order in which they are done."""
    return tuple(bit for bit in (*range(63, 8, -1), 6, 5, 4, 8, 7, 3, 2, 1, 0) if 1 << bit < twos)


def _base_sums(t: tuple[Tensor, ...], columns: tuple[tuple[int, ...], ...]) -> Tensor:
    """Of each column of signs the sum of t times them: four by four, pairs first."""
    parts = []
    for i in range(0, len(t), 4):  # what several columns have in common is added once
        (a, b), (c, d) = ((t[j] + t[j + 1], t[j] - t[j + 1]) for j in (i, i + 2))
        part = {(1, 1): (a + c, a - c), (1, -1): (a + d, a - d), (-1, 1): (b + c, b - c), (-1, -1): (b + d, b - d)}
        parts.append(part)
    results = []
    for column in columns:
        total = torch.zeros((), dtype=t[0].dtype, device=t[0].device)  # nothing plus a number is the number
        for part, i in zip(parts, range(0, len(t), 4), strict=True):
            s, s1, s2, s3 = column[i : i + 4]
            term = part[s * s1, s2 * s3][0 if s == s2 else 1]
            total = total + term if s > 0 else total - term
        results.append(total)
    return torch.stack(results)


def power_scale(block: int) -> float:
    """The power of two next to 1 / sqrt(block): itself, where log2(block) is even. Products with it are exact."""
    return 2.0 ** -round(math.log2(block) / 2)


def hadamard_transform(x: Tensor, block: int, scale: float | None = None) -> Tensor:
    """x [..., c * block] float, every `block` neighbours times diag(signs), the matrix of +1 and -1, and the scale.

    scale  None: 1 / sqrt(block), with which the map is orthogonal.
    -> the shape and type of x: computed in float32 (float64 for float64), rounded once to the type of x.
    Source: docs/numerics.md 15.
    """
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    given = wide.unflatten(-1, (-1, block)) * signs(block, x.device).to(wide.dtype)
    return (sums(given.flatten(-2), block) * _factor(block, scale) + 0.0).to(x.dtype)


def hadamard_backward(grad: Tensor, block: int, scale: float | None = None) -> Tensor:
    """The gradient of hadamard_transform: the transpose of its matrix, without a scale its inverse. As grad."""
    wide = grad if grad.dtype == torch.float64 else grad.to(torch.float32)
    turned = sums(wide, block, transposed=True) * _factor(block, scale)
    return (turned.unflatten(-1, (-1, block)) * signs(block, grad.device).to(wide.dtype)).flatten(-2).to(grad.dtype)


def hadamard_quantize(
    x: Tensor,
    block: int,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_dynamic, per token, of hadamard_transform, which is not rounded to 16 bits in between."""
    turned = hadamard_transform(x.to(torch.float32), block, scale)
    return quantize_dynamic(turned, "per_token", 0, symmetric, qmin, qmax)


def _factor(block: int, scale: float | None) -> float:
    return 1.0 / math.sqrt(block) if scale is None else scale


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
