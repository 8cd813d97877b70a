"""Second moments as a product of triangles: what codes of columns and corrected targets are found with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyquant.errors import ArgumentError, NonFiniteError


@dataclass(frozen=True)
class Ldl:
    """H + damping = P^T L^T D L P, float64: P puts the columns into an order, L is lower triangular with a diagonal of
    ones, D diagonal. Row j of L says what the errors of the columns before add to column j."""

    order: Tensor  # int64 [K]: which column is at a place
    lower: Tensor  # [K, K]
    diagonal: Tensor  # [K]

    def solve(self, rows: Tensor) -> Tensor:
        """rows (H + damping)^-1, float64 [N, K], for float64 rows."""
        solved = torch.linalg.solve_triangular(self.lower, rows[:, self.order], upper=False, left=False)
        solved /= self.diagonal
        solved = torch.linalg.solve_triangular(self.lower.t(), solved, upper=True, left=False, unitriangular=True)
        found = torch.empty_like(rows)
        found[:, self.order] = solved
        return found


def ldl_of(hessian: Tensor, damp: float, *, act_order: bool) -> Ldl:
    """The triangles of float64 moments [K, K].

    damp       added to the diagonal, as a share of its mean; ten times as much, and so on, where that is too little.
    act_order  columns with the largest diagonal first, instead of as they are.
    Columns of inputs that are always zero have a 1 on the diagonal: there is nothing to make up for.
    Raises ArgumentError where the moments are singular, NonFiniteError.
    Source: Chee et al., "QuIP: 2-Bit Quantization of Large Language Models With Guarantees", arXiv 2307.13304,
    section 3: rounding with these triangles is GPTQ, without its inverse.
    """
    if not bool(hessian.isfinite().all()):
        raise NonFiniteError("moments", "NaN or infinity", "finite numbers")
    diagonal = hessian.diagonal()
    order = torch.arange(len(diagonal), device=hessian.device)
    if act_order:
        order = diagonal.argsort(descending=True, stable=True)
    last_first = order.flip(0)
    extra = (diagonal <= 0).double()[last_first]
    mean = float(diagonal.mean())
    for factor in (1, 10, 100, 1000):  # inputs that depend on each other need more damping than asked for
        damped = hessian[last_first[:, None], last_first]
        damped.diagonal().add_(extra).add_(damp * factor * mean)
        upper, info = torch.linalg.cholesky_ex(damped, upper=True)
        del damped
        if int(info) == 0:
            lower = upper.flip(0, 1)
            roots = lower.diagonal().clone()
            lower /= roots[:, None]
            return Ldl(order, lower, roots.square())
    raise ArgumentError("damp", damp, "a larger share: the second moments are singular")
