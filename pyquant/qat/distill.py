"""Distillation: the float model as the teacher of its quantised twin, as a loss for finetune and other loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.core import arguments
from pyquant.errors import ArgumentError

Loss = Callable[[nn.Module, Any], Tensor]


def distillation(
    teacher: nn.Module,
    outputs: Callable[[nn.Module, Any], Tensor],
    loss: Callable[[Tensor, Any], Tensor] | None = None,
    *,
    share: float = 0.5,
    temperature: float = 1.0,
) -> Loss:
    """A loss that asks for the teacher's predictions, and for the labels as far as `share` leaves them a part.

    teacher      the float model, a copy of its own (deepcopy before prepare_qat_); put into eval mode, not trained.
    outputs      fn(model, batch) -> logits [..., classes], called with the model that is trained and with the teacher.
    loss         fn(logits, batch) -> scalar, the loss of the task; None with share=1 only: no labels are needed.
    share        in (0, 1]: share * KL(teacher || model) + (1 - share) * loss.
    temperature  > 0, divides the logits of both; the KL divergence is multiplied by its square.
    ->           fn(model, batch) -> scalar, for finetune. The divergence is a mean over rows, in float32.
    Raises ArgumentError for wrong arguments; when called, for outputs that are no logits of one shape, and for a
    teacher that holds parameters of the model, which would move with it.
    Source: Hinton, Vinyals, Dean 2015, arXiv:1503.02531; docs/qat.md 6.

    Example:
        >>> import copy
        >>> from pyquant import W4A8Dynamic, finetune, prepare_qat_
        >>> model = nn.Sequential(nn.Linear(4, 3))
        >>> teacher = copy.deepcopy(model)
        >>> kl = distillation(teacher, lambda m, x: m(x), share=1.0)
        >>> kl(model, torch.ones(2, 4)).item()
        0.0
        >>> losses = finetune(prepare_qat_(model, W4A8Dynamic(None)), kl, [torch.ones(2, 4)], lr=0.1, steps=4)
    """
    arguments.number("share", share, 0, 1, above=True)
    arguments.number("temperature", temperature, 0, above=True)
    if loss is None and share < 1:
        raise ArgumentError("loss", "None", f"fn(logits, batch) -> scalar for share={share:g}, or share=1")
    arguments.module("teacher", teacher).eval()
    arguments.function("outputs", outputs, "(model, batch) -> logits", optional=False)
    arguments.function("loss", loss, "(logits, batch) -> scalar")
    own = {id(p) for p in teacher.parameters()}

    def distilled(model: nn.Module, batch: Any) -> Tensor:
        if any(id(p) in own for p in model.parameters()):
            raise ArgumentError("teacher", "a model that shares parameters with the one that is trained", "a deepcopy")
        logits = _logits(outputs(model, batch))
        with torch.no_grad():
            teacher_logits = _logits(outputs(teacher, batch))
        if logits.dim() < 1 or logits.shape != teacher_logits.shape:
            got = f"{list(logits.shape)} of the model, {list(teacher_logits.shape)} of the teacher"
            raise ArgumentError("outputs", got, "logits [..., classes] of one shape")
        p, q = ((t.float() / temperature).log_softmax(-1).reshape(-1, t.shape[-1]) for t in (teacher_logits, logits))
        result = share * temperature**2 * F.kl_div(q, p, log_target=True, reduction="batchmean")
        return result if loss is None or share == 1 else result + (1 - share) * loss(logits, batch)

    return distilled


def _logits(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ArgumentError("outputs", f"a function that returned {arguments.shown(output)}", "one that returns logits")
    return output
