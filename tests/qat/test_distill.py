"""The float model as teacher: the divergence by hand, its share, its gradient, and what goes wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from qat_models import draw, mlp, prepared
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant import ArgumentError, QATRecipe, distillation, finetune
from pyquant.core.presets import W4A4Dynamic

Batch = tuple[Tensor, Tensor]


def logits(model: nn.Module, batch: Batch) -> Tensor:
    y: Tensor = model(batch[0])
    return y


def task(y: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(y.flatten(0, -2), batch[1].flatten())


def batch_of(*path: object) -> Batch:
    d = draw("distill", *path)
    return d.normal(3, 5, 32), torch.arange(15).view(3, 5)


def by_hand(teacher: nn.Module, model: nn.Module, x: Tensor, temperature: float) -> Tensor:
    """sum p log(p / q) over classes, mean over rows, in float64."""
    p, q = ((m(x).double() / temperature).softmax(-1) for m in (teacher, model))
    return temperature**2 * (p.detach() * (p.detach() / q).log()).sum(-1).mean()


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_value_and_gradient(share: float, temperature: float) -> None:
    teacher, model, batch = mlp("teacher"), mlp("student"), batch_of("value")
    twin = copy.deepcopy(model)
    loss = distillation(teacher, logits, None if share == 1 else task, share=share, temperature=temperature)
    got = loss(model, batch)
    want = share * by_hand(teacher, twin, batch[0], temperature) + (1 - share) * task(twin(batch[0]), batch).double()
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    got.backward()
    want.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in teacher.parameters())


def test_the_float_model_is_its_own_fixed_point() -> None:
    """So an equally long float control of pure distillation is the float model itself."""
    model, batch = mlp("teacher"), batch_of("fixed")
    value = distillation(copy.deepcopy(model), logits, share=1.0)(model, batch)
    value.backward()
    assert abs(value.item()) < 1e-6
    assert all(p.grad.abs().max() < 1e-6 for p in model.parameters())


def test_sixteen_bits_are_compared_in_float32_and_the_teacher_is_in_eval_mode() -> None:
    teacher = nn.Sequential(mlp("teacher"), nn.Dropout(0.5)).bfloat16()
    model = copy.deepcopy(teacher)
    loss = distillation(teacher, logits, share=1.0)
    assert not teacher.training
    x, y = batch_of("bf16")
    value = loss(model.eval(), (x.bfloat16(), y))
    assert value.dtype == torch.float32
    assert abs(value.item()) < 1e-6


def test_training_without_labels_comes_closer_to_the_teacher() -> None:
    teacher, batch = mlp("teacher"), batch_of("train")
    model = prepared(copy.deepcopy(teacher), W4A4Dynamic())
    loss = distillation(teacher, logits, share=1.0)
    recipe = QATRecipe(bits=4, optimizer="muon")
    losses = finetune(model, loss, [batch], lr=0.01, steps=40, recipe=recipe)
    assert losses[-1] < 0.5 * losses[0]


def test_a_teacher_that_would_move_with_the_student_is_refused() -> None:
    model = mlp("teacher")
    with pytest.raises(ArgumentError, match="teacher"):
        distillation(model, logits, share=1.0)(model, batch_of("shared"))
    teacher = nn.Sequential(*model)
    prepared(model, W4A4Dynamic())  # in place, around the same parameters
    with pytest.raises(ArgumentError, match="deepcopy"):
        distillation(teacher, logits, share=1.0)(model, batch_of("shared"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"share": 0}, "share"),
        ({"share": 1.5}, "share"),
        ({"share": True}, "share"),
        ({"share": 0.5}, "loss"),
        ({"share": 1, "temperature": 0}, "temperature"),
        ({"share": 1, "temperature": float("inf")}, "temperature"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        distillation(mlp("teacher"), logits, **options)
    assert error.value.argument == told


def test_outputs_of_two_shapes_are_refused() -> None:
    loss = distillation(nn.Linear(32, 3), logits, share=1.0)
    with pytest.raises(ArgumentError, match="outputs"):
        loss(nn.Linear(32, 4), batch_of("shape"))
