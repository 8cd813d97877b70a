"""'noise': the loss under noise as large as a format's code steps, in the weights and inputs of one group.

Source: Schaefer et al., Mixed Precision Post Training Quantization of Neural Networks with Sensitivity Guided Search,
arXiv:2302.01382 (noise injection); here the noise is what rounding would do: uniform, one code step wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.mixed_precision.loss.metrics import Accumulator
from pyquant.mixed_precision.loss.scorers.layers import rounded_input, watching, weight_steps
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Scoring, Table, Work, sensitivity_metric


@sensitivity_metric("noise")
class Noise(Scorer):
    """The label-free loss with noise in one group, mean over draws."""

    repeats = 2
    needs_floats = True

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring)
        metric = scoring.loss.metric
        self.unit, self.predicts, self.loss_name = metric.unit, metric.additive, metric.name

    def work(self) -> list[Work]:
        passes = len(self.scoring.batches)
        return [
            Work(f"{g},{f} draw {draw}", (g, f, draw), forwards=passes)
            for g, f in self.scoring.cells()
            for draw in range(self.draws)
        ]

    def measure(self, work: Work) -> Sequence[float]:
        g, f, draw = work.at
        scoring, switchable = self.scoring, self.scoring.switchable
        names = switchable.groups[g].layers
        generator = scoring.generator(switchable.device, "noise", g, f, draw)
        noisy = {name: _noisy_weight(switchable.layer(name, 0), switchable.layer(name, f), generator) for name in names}

        def see(name: str, x: Tensor, _: Tensor) -> Tensor:
            _, step = rounded_input(switchable.layer(name, f), x)
            return _apply(switchable.layer(name, 0), x + _uniform(x.shape, step, generator).to(x.dtype), noisy[name])

        floats = scoring.loss.floats()
        distance = Accumulator(scoring.loss.metric)
        with watching(switchable, see, names), torch.no_grad():
            for reference, batch in zip(floats, scoring.batches, strict=True):
                distance.add(reference, switchable.call(batch))
        return [distance.value()]

    def table(self, rows: Sequence[Sequence[float]]) -> Table:
        drawn = [rows[i : i + self.draws] for i in range(0, len(rows), self.draws)]
        return self.filled(math.fsum(row[0] for row in rows) / self.draws for rows in drawn)


def _uniform(shape: Any, step: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [-step / 2, step / 2)."""
    return (torch.rand(shape, generator=generator, dtype=torch.float32, device=step.device) - 0.5) * step


def _noisy_weight(layer: Any, quantised: Any, generator: torch.Generator) -> Tensor:
    noise = _uniform(layer.weight.shape, weight_steps(quantised), generator)
    return (layer.weight.detach() + noise).to(layer.weight.dtype)


def _apply(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return layer._conv_forward(x, weight, layer.bias)
    return F.linear(x, weight, layer.bias)
