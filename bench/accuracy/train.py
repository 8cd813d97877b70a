"""Training: the float schedule, and a second, shorter one for quantisation-aware training and its float control."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from bench.accuracy.models import Batch, Task, loss_of


@dataclass(frozen=True)
class Schedule:
    """Warm-up over a tenth of the steps, then half a cosine to 1 % of the peak.

    optimiser      'adamw' or 'sgd' (Nesterov momentum 0.9).
    learning_rate  at the peak.
    """

    optimiser: str
    learning_rate: float

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimiser == "sgd":
            return torch.optim.SGD(parameters, self.learning_rate, momentum=0.9, nesterov=True)
        return torch.optim.AdamW(parameters, self.learning_rate, weight_decay=0.0)

    def factor(self, step: int, steps: int) -> float:
        warm = max(1, steps // 10)
        if step < warm:
            return (step + 1) / warm
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(model: nn.Module, batches: Iterable[Batch], steps: int, schedule: Schedule) -> nn.Module:
    """Train a model in place for `steps` batches; gradients are clipped to norm 1. -> the model, in eval mode."""
    optimiser = schedule.make(model)
    model.train()
    for step, batch in enumerate(batches):
        for group in optimiser.param_groups:
            group["lr"] = schedule.learning_rate * schedule.factor(step, steps)
        optimiser.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model.eval()


def train_float(task: Task, seed: int, share: float = 1.0) -> nn.Module:
    """The float model of a task, trained from the seed on a share of its schedule."""
    torch.manual_seed(seed)
    model = task.make()
    steps = max(1, round(task.steps * share))
    return train(
        model, task.batches("train", steps, task.batch_size, seed), steps, Schedule("adamw", task.learning_rate)
    )
