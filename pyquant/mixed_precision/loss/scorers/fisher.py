"""'fisher': one forward and one backward pass for all groups and formats.

With g the gradient at a layer's output and dy what a format changes there, the loss rises by 1/2 E[(sum_c g_c dy_c)^2],
whole products of a token squared, not single elements. The loss is the label-free one: for 'kl' the gradient is that of
-log p of a label drawn from the model's own softmax, which makes E[g g^T] the Gauss-Newton matrix of KL.
Source: docs/sensitivity.md 3; Pascanu and Bengio 2014, arXiv:1301.3584 (the Fisher matrix as curvature of KL).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyquant.calibrate.padding import counted, left_out
from pyquant.errors import UnsupportedError
from pyquant.mixed_precision.loss.scorers.curvature import find_curvature, joined, rows_of
from pyquant.mixed_precision.loss.scorers.layers import gradients_of, no_gradients, watching
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Scoring, Table, Work, sensitivity_metric


@sensitivity_metric("fisher")
class Fisher(Scorer):
    """A row of work is one batch: the sum of squares for every cell, then the weight of the batch."""

    repeats = 1

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring)
        self.unit, self.loss_name = scoring.loss.unit, scoring.loss.metric.name
        self._curvature = find_curvature(self.loss_name)

    @property
    def width(self) -> int:
        return len(self.scoring.cells()) + 1

    @property
    def backwards(self) -> int:
        return self.draws

    def measure(self, work: Work) -> Sequence[float]:
        scoring, switchable, cells = self.scoring, self.scoring.switchable, self.scoring.cells()
        cells_of = scoring.cells_of()
        products: dict[tuple[int, int], list[Tensor]] = {}

        def see(name: str, x: Tensor, y: Tensor) -> Tensor:
            leaf = y if y.requires_grad else y.detach().requires_grad_()
            before, version = leaf.detach().clone(), x._version  # what follows may work in place
            axis = -3 if isinstance(switchable.layer(name, 0), nn.Conv2d) else -1
            changes: dict[int, Tensor] = {}

            @torch.no_grad()
            def backward(g: Tensor) -> None:
                if x._version != version:
                    raise UnsupportedError(f"{name}: its input is changed in place after the layer; use metric 'kl'")
                for cell in cells_of[name]:
                    f = cell[1]
                    dy = changes[f] if f in changes else switchable.layer(name, f)(x).double() - before.double()
                    if self.draws > 1:
                        changes[f] = dy
                    products.setdefault(cell, []).append((g.double() * dy).sum(axis).reshape(-1))

            leaf.register_hook(backward)
            return leaf.clone()

        sums = [[0.0] for _ in cells]
        with watching(switchable, see) as model, gradients_of(model, []):
            whole, padding = switchable.whole(scoring.batches[work.at])
            rows = rows_of(whole).shape[0]  # of padded positions, too: layers have a gradient for each
            with left_out(padding):
                outputs = rows_of(counted(whole))
            if not outputs.requires_grad:
                raise no_gradients("the layers")
            for draw in range(self.draws):
                products.clear()
                generator = scoring.generator(outputs.device, "fisher", work.at, draw)
                self._curvature.drawn(outputs, generator).backward(retain_graph=draw + 1 < self.draws)  # type: ignore[no-untyped-call]
                for i, cell in enumerate(cells):
                    for dots in joined(products.get(cell, ()), rows):
                        sums[i].append(dots.square().sum().item())
        return [*(math.fsum(s) * self._curvature.factor / self.draws for s in sums), self._curvature.weight(outputs)]

    def table(self, rows: Sequence[Sequence[float]]) -> Table:
        *sums, weight = (math.fsum(column) for column in zip(*rows, strict=True))
        return self.filled(total / weight if weight else 0.0 for total in sums)
