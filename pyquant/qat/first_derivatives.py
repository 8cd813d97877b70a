"""Gradients that have no gradients of their own, and say so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyquant.errors import UnsupportedError


def once_only(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients that a backward pass found, from which, where autograd records it (create_graph=True), going on
    backwards raises: what they were computed from are codes, constants to autograd, so that it would find a part of the
    second derivative, or zeros. Not noticed in what torch.compile traces."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradients
    given = [g for g in gradients if g is not None]
    anchor = given[0].new_zeros((), requires_grad=True)  # or autograd would see nothing more to differentiate
    passed = iter(_OnceOnly.apply(anchor, *given))  # type: ignore[no-untyped-call]
    return tuple(None if g is None else next(passed) for g in gradients)


class _OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise UnsupportedError(
            "second derivatives (create_graph=True) through forward='int8' or learned ranges: prepare_qat_ with "
            "forward='simulated' and learn_amax=False has them"
        )
