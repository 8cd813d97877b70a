"""Triangles of second moments: they multiply to them, in both orders, and solve with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pyquant import ArgumentError, NonFiniteError
from pyquant.ptq.improve.ldl import ldl_of


def moments(k: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * k + 3, k, generator=g, dtype=torch.float64) * torch.rand(k, generator=g) * 3
    return rows.t() @ rows


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("k", [1, 2, 7, 40])
def test_they_multiply_to_the_damped_moments(k, act_order) -> None:
    hessian = moments(k)
    ldl = ldl_of(hessian, 0.01, act_order=act_order)
    want = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(k).double()
    largest_first = hessian.diagonal().argsort(descending=True)
    assert torch.equal(ldl.order, largest_first if act_order else torch.arange(k))
    assert torch.equal(ldl.lower, ldl.lower.tril())
    assert torch.equal(ldl.lower.diagonal(), torch.ones(k).double())
    found = ldl.lower.t() @ ldl.diagonal.diag() @ ldl.lower
    torch.testing.assert_close(found, want[ldl.order][:, ldl.order])


@pytest.mark.parametrize("act_order", [False, True])
def test_it_solves_as_numpy_does(act_order) -> None:
    hessian, rows = moments(12), torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).double()
    found = ldl_of(hessian, 0.01, act_order=act_order).solve(rows)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(12).double()
    np.testing.assert_allclose(found.numpy(), np.linalg.solve(damped.numpy(), rows.numpy().T).T, rtol=1e-9)


def test_an_input_that_is_always_zero_has_nothing_to_do_with_the_others() -> None:
    hessian = moments(6)
    hessian[2] = hessian[:, 2] = 0
    ldl = ldl_of(hessian, 0.01, act_order=False)
    want = torch.zeros(6).double()
    want[2] = 1
    assert torch.equal(ldl.lower[2], want)
    assert torch.equal(ldl.lower[:, 2], want)
    assert torch.equal(ldl_of(hessian * 0, 0.01, act_order=True).lower, torch.eye(6).double())


def test_dependent_inputs_are_damped_more_and_broken_ones_refused() -> None:
    hessian = 10 * torch.eye(4).double() - 2.75 * torch.ones(4, 4).double()  # an eigenvalue of -1
    mean = float(hessian.diagonal().mean())
    share = 0.2 / mean  # too little; ten times as much is enough
    ldl = ldl_of(hessian, share, act_order=False)
    found = ldl.lower.t() @ ldl.diagonal.diag() @ ldl.lower
    torch.testing.assert_close(found, hessian + 10 * share * mean * torch.eye(4).double())
    with pytest.raises(ArgumentError, match="damp"):
        ldl_of(hessian, share * 1e-6, act_order=False)
    with pytest.raises(NonFiniteError, match="moments"):
        ldl_of(hessian * torch.nan, 0.01, act_order=False)
