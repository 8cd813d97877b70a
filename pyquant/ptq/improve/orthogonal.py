"""Seeded rotations of a number of channels: orthogonal maps that spread every channel over all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyquant.numerics.hadamard import base_of, sums


class Rotation:
    """x -> x Q in float64, Q orthogonal [size, size]: a random diagonal of signs, then a Hadamard matrix.

    Where no Hadamard matrix of the size is known: one of the largest power of two that divides it, times (Kronecker) a
    random orthogonal matrix.
    then        a matrix [size, size] in float64 that follows: Q then. Orthogonal, and with keeps_ones itself such.
    keeps_ones  also 1 Q = 1, so that the mean over channels stays, and LayerNorm commutes with Q as RMSNorm does with
                every rotation: one Householder reflection, which moves an entry by some 1 / size.
    Source: Ashkboos et al., "QuaRot", arXiv 2404.00456, section 4 (the signs: section 3.1).
    """

    def __init__(self, size: int, generator: torch.Generator, keeps_ones: bool, then: Tensor | None = None) -> None:
        self._then: Tensor | None = None  # until the mirror is found, which is that of Q alone
        self.size, self._order = size, size if base_of(size) is not None else size & -size
        self._signs = torch.randint(2, (size,), generator=generator, device="cpu").double() * 2 - 1
        parts = size // self._order
        normal = torch.randn(parts, parts, generator=generator, dtype=torch.float64, device="cpu")
        self._across = torch.linalg.qr(normal)[0] if parts > 1 else None
        self._mirror: Tensor | None = None
        if keeps_ones:
            ones = torch.ones(size, dtype=torch.float64, device="cpu")
            mirror = self(ones) - ones
            # a rotation that keeps the ones already has no mirror to find
            self._mirror = mirror / mirror.norm() if float(mirror.norm()) > 1e-6 else None
        self._then = then

    def __call__(self, x: Tensor) -> Tensor:
        """x float64 [..., size] -> x Q."""
        y = sums(x * self._signs.to(x.device), self._order) / math.sqrt(self._order)
        if self._across is not None:
            parts = y.unflatten(-1, (-1, self._order))
            y = torch.einsum("...ab,ac->...cb", parts, self._across.to(x.device)).flatten(-2)
        if self._mirror is not None:
            mirror = self._mirror.to(x.device)
            y = y - 2 * (y @ mirror)[..., None] * mirror
        return y if self._then is None else y @ self._then.to(y.device)
