"""'error': how much weights and inputs change by rounding, relative to themselves; the model runs once, in float."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyquant.mixed_precision.loss.metrics import Accumulator
from pyquant.mixed_precision.loss.scorers.layers import rounded_input, watching, weight_change
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Table, Work, sensitivity_metric


@sensitivity_metric("error")
class RoundingError(Scorer):
    """Noise to signal of a group's weights plus that of its inputs: ||dW||^2 / ||W||^2 + ||dx||^2 / ||x||^2.

    A row of work is one batch: for every cell the squares of inputs and of what rounding changes in them.
    """

    unit = "noise to signal of weights and inputs"
    predicts = False

    @property
    def width(self) -> int:
        return 2 * len(self.scoring.cells())

    def work(self) -> list[Work]:
        return [Work(f"batch {i}", i, forwards=1) for i in range(len(self.scoring.batches))]

    def measure(self, work: Work) -> Sequence[float]:
        switchable, cells = self.scoring.switchable, self.scoring.cells()
        group_of = {layer: g for g, group in enumerate(switchable.groups) for layer in group.layers}
        sums: dict[tuple[int, int], list[list[float]]] = {cell: [[0.0], [0.0]] for cell in cells}

        def see(name: str, x: Tensor, _: Tensor) -> None:
            g = group_of[name]
            for cell in cells:
                if cell[0] == g:
                    y = rounded_input(switchable.layer(name, cell[1]), x)[0].double()
                    sums[cell][0].append(x.double().square().sum().item())
                    sums[cell][1].append((y - x.double()).square().sum().item())

        with watching(switchable, see), torch.no_grad():
            switchable.call(self.scoring.batches[work.at])
        return [math.fsum(part) for cell in cells for part in sums[cell]]

    def table(self, rows: Sequence[Sequence[float]]) -> Table:
        switchable, table = self.scoring.switchable, self.empty()
        for i, (g, f) in enumerate(self.scoring.cells()):
            signal, noise = (math.fsum(row[2 * i + k] for row in rows) for k in (0, 1))
            inputs = noise / signal if signal else 0.0
            weights = Accumulator("sqnr")
            for name in switchable.groups[g].layers:
                old = switchable.layer(name, 0)
                w = old.weight.detach().double().reshape(1, -1)  # type: ignore[operator,union-attr]
                weights.add(w, w + weight_change(old, switchable.layer(name, f)).reshape(1, -1))
            table[g][f] = weights.value() + inputs
        return table
