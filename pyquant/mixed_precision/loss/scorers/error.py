"""'error': how much weights and inputs change by rounding, relative to themselves; the model runs once, in float."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyquant.calibrate.padding import counted
from pyquant.mixed_precision.loss.metrics import Accumulator
from pyquant.mixed_precision.loss.scorers.layers import rounded_input, watching, weight_change
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Table, Work, sensitivity_metric
from pyquant.nn.qconv import QConv2d


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

    def measure(self, work: Work) -> Sequence[float]:
        switchable, cells, cells_of = self.scoring.switchable, self.scoring.cells(), self.scoring.cells_of()
        sums: dict[tuple[int, int], list[list[float]]] = {cell: [[0.0], [0.0]] for cell in cells}

        def see(name: str, x: Tensor, _: Tensor) -> None:
            for cell in cells_of[name]:
                layer = switchable.layer(name, cell[1])
                y = rounded_input(layer, x)[0]
                x64, y64 = (t.double() if isinstance(layer, QConv2d) else counted(t).double() for t in (x, y))
                sums[cell][0].append(x64.square().sum().item())
                sums[cell][1].append((y64 - x64).square().sum().item())

        with watching(switchable, see), torch.no_grad():
            switchable.call(self.scoring.batches[work.at])
        return [math.fsum(part) for cell in cells for part in sums[cell]]

    def table(self, rows: Sequence[Sequence[float]]) -> Table:
        switchable, sums = self.scoring.switchable, [math.fsum(column) for column in zip(*rows, strict=True)]
        values = []
        for (g, f), signal, noise in zip(self.scoring.cells(), sums[::2], sums[1::2], strict=True):
            weights = Accumulator("sqnr")
            for name in switchable.groups[g].layers:
                old: Any = switchable.layer(name, 0)
                w = old.weight.detach().double().reshape(1, -1)
                weights.add(w, w + weight_change(old, switchable.layer(name, f)).reshape(1, -1))
            values.append(weights.value() + (noise / signal if signal else 0.0))
        return self.filled(values)
