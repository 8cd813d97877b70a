"""'hessian': 1/2 * mean eigenvalue of the Hessian of a layer's weights * ||dW||^2; inputs are not looked at.

The trace is Hutchinson's estimate with Rademacher probes, of the label-free loss (whose Hessian at the float model is
the Gauss-Newton matrix) or of loss_fn. Source: Dong et al., HAWQ-V2, arXiv:1911.03852, equations 4 to 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyquant.mixed_precision.loss.scorers.curvature import find_curvature, rows_of
from pyquant.mixed_precision.loss.scorers.layers import gradients_of, no_gradients, watching, weight_change
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Scoring, Table, Work, sensitivity_metric


@sensitivity_metric("hessian")
class HessianTrace(Scorer):
    """A row of work is one batch: the trace of every layer, then the weight of the batch."""

    repeats = 4

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring)
        fn, metric = scoring.loss_fn, scoring.loss.metric
        self._curvature = find_curvature(metric.name) if fn is None else None
        self.unit = metric.unit if fn is None else "loss_fn"
        self.loss_name = metric.name if fn is None else getattr(fn, "__qualname__", type(fn).__qualname__)

    @property
    def _layers(self) -> list[str]:
        return list(self.scoring.switchable.group_of)

    @property
    def width(self) -> int:
        return len(self._layers) + 1

    @property
    def backwards(self) -> int:
        return 1 + 2 * self.draws  # a Hessian-vector product goes back through the backward pass as well

    def measure(self, work: Work) -> Sequence[float]:
        switchable = self.scoring.switchable
        weights: list[nn.Parameter] = [switchable.layer(name, 0).weight for name in self._layers]  # type: ignore[misc]
        # watched by nobody: encoder layers stay on their ordinary path
        # attention kernels have no second derivative; the plain formula has
        with watching(switchable, lambda *_: None) as model, gradients_of(model, weights), sdpa_kernel(SDPBackend.MATH):
            loss, weight = self._loss(model, self.scoring.batches[work.at])
            if not loss.requires_grad:
                raise no_gradients("the weights")
            first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            traces = [[0.0] for _ in weights]
            for draw in range(self.draws):
                generator = self.scoring.generator(weights[0].device, "hessian", work.at, draw)
                probes = [
                    torch.randint(0, 2, w.shape, generator=generator, device=w.device).to(w.dtype) * 2 - 1
                    for w in weights
                ]
                dots = [(g * v).sum() for g, v in zip(first, probes, strict=True) if g is not None and g.requires_grad]
                if not dots:  # a loss without curvature
                    break
                second = torch.autograd.grad(
                    torch.stack(dots).sum(), weights, retain_graph=True, allow_unused=True, materialize_grads=True
                )
                for trace, v, hv in zip(traces, probes, second, strict=True):
                    trace.append((v.double() * hv.double()).sum().item())
        return [*(math.fsum(t) / self.draws for t in traces), weight]

    def table(self, rows: Sequence[Sequence[float]]) -> Table:
        switchable = self.scoring.switchable
        *sums, weight = (math.fsum(column) for column in zip(*rows, strict=True))
        traces = {name: total / weight if weight else 0.0 for name, total in zip(self._layers, sums, strict=True)}

        def rise(name: str, f: int) -> float:
            change = weight_change(switchable.layer(name, 0), switchable.layer(name, f))
            return 0.5 * traces[name] / max(1, change.numel()) * change.square().sum().item()

        layers = [group.layers for group in switchable.groups]
        return self.filled(math.fsum(rise(name, f) for name in layers[g]) for g, f in self.scoring.cells())

    def _loss(self, model: nn.Module, batch: object) -> tuple[Tensor, float]:
        """A scalar, the batch's sum; the weight of the batch."""
        if self._curvature is None:
            return self.scoring.loss_fn(model, batch), 1.0  # type: ignore[misc]
        outputs = rows_of(self.scoring.switchable.call(batch))
        return self._curvature.loss(outputs), self._curvature.weight(outputs)
