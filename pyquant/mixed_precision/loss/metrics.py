"""How far outputs are from reference outputs: KL, noise to signal, mean squared error, cosine.

Every metric is a few float64 numbers a row (the last dimension is a row: a token, a sample) and a rule that makes one
number of their sums. The sums are exact (math.fsum), so how rows are cut into batches changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pyquant.core import arguments
from pyquant.errors import ArgumentError, CalibrationError, NonFiniteError

_CHUNK: Final = 2**22  # elements that are held in float64 at once: 32 MiB


@dataclass(frozen=True)
class OutputMetric:
    """A distance between outputs; small is better, 0 where they are equal.

    name      as users spell it.
    unit      of its values.
    additive  the distances of single layers add up, to first order, to that of all of them together.
    rows      (reference, output), float64 [rows, columns] -> terms, float64 [rows, terms].
    finish    (sums of the terms, number of rows) -> the distance.
    """

    name: str
    unit: str
    additive: bool
    rows: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[Sequence[float], int], float]


class Accumulator:
    """One metric over many batches.

    metric   an OutputMetric, or its name:
             'kl'      KL(softmax(reference) || softmax(output)) of the last dimension, nats, mean of the rows.
             'sqnr'    sum of squares of the difference over that of the reference: 1 / SQNR, which adds up over
                       independent errors. A reference that is all zero gives 0 where the output is too, else infinity.
             'mse'     mean squared difference of all elements.
             'cosine'  1 - cosine of the angle between rows, mean of the rows; 0 between rows of zeros, 1 between one
                       and anything else.
    """

    def __init__(self, metric: str | OutputMetric) -> None:
        self.metric = find_metric(metric) if isinstance(metric, str) else metric
        self._terms: list[list[list[float]]] = []  # [pieces][terms][rows]
        self._batches = 0

    def add(self, reference: Tensor, output: Tensor) -> None:
        """One batch: two tensors of equal shape [..., columns], any floating-point dtype, on one device.

        Raises ArgumentError for other shapes, NonFiniteError naming the batch for NaN and infinity.
        """
        reference, output = _checked(reference, output, self._batches)
        self._batches += 1
        step = max(1, _CHUNK // max(1, reference.shape[1]))
        for first in range(0, reference.shape[0], step):
            a, b = (t[first : first + step].to(torch.float64) for t in (reference, output))
            self._terms.append(self.metric.rows(a, b).T.tolist())

    def value(self) -> float:
        """The metric over everything so far. Raises CalibrationError where that is nothing."""
        if not self._terms:
            raise CalibrationError(f"metric '{self.metric.name}': no rows to compare")
        sums = [math.fsum(x for piece in self._terms for x in piece[i]) for i in range(len(self._terms[0]))]
        return self.metric.finish(sums, sum(len(piece[0]) for piece in self._terms))


def find_metric(name: str) -> OutputMetric:
    """The metric of that name. Raises ArgumentError for an unknown one."""
    return OUTPUT_METRICS[arguments.one_of("metric", name, OUTPUT_METRICS)]


def _checked(reference: Tensor, output: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Both as [rows, columns]."""
    for name, tensor in (("reference", reference), ("output", output)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() == 0:
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentError(name, f"{got} (batch {batch})", "a floating-point tensor [..., columns]")
        if not torch.isfinite(tensor).all():
            raise NonFiniteError(name, f"NaN or infinity in the outputs of batch {batch}", "finite numbers")
    if reference.shape != output.shape:
        raise ArgumentError("output", f"{list(output.shape)} (batch {batch})", f"{list(reference.shape)}")
    columns = reference.shape[-1]
    return reference.detach().reshape(-1, columns), output.detach().reshape(-1, columns)


def check_columns(metric: str, columns: int) -> None:
    """Raise ArgumentError where one number a row has no distance of its own: it is all of the probability, and all of
    the direction."""
    if columns < 2:
        allowed = "'mse' or 'sqnr', or two columns and more in the last dimension (of 'kl': logits of classes)"
        raise ArgumentError("metric", f"'{metric}' of outputs [..., {columns}]", allowed)


def _kl_rows(reference: Tensor, output: Tensor) -> Tensor:
    check_columns("kl", reference.shape[1])
    log_p, log_q = torch.log_softmax(reference, -1), torch.log_softmax(output, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True)


def _square_rows(reference: Tensor, output: Tensor) -> Tensor:
    return torch.stack([reference.square().sum(-1), (output - reference).square().sum(-1)], -1)


def _mean_square_rows(reference: Tensor, output: Tensor) -> Tensor:
    return (output - reference).square().mean(-1, keepdim=True)


def _angle_rows(reference: Tensor, output: Tensor) -> Tensor:
    """1 - cosine as half the squared distance of unit vectors: exact also where it is tiny."""
    check_columns("cosine", reference.shape[1])
    a, b = (t / t.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny) for t in (reference, output))
    distance = (a - b).square().sum(-1, keepdim=True) / 2
    return torch.where((a == 0).all(-1, keepdim=True) ^ (b == 0).all(-1, keepdim=True), 1.0, distance)


def mean(sums: Sequence[float], rows: int) -> float:
    """The `finish` of a metric with one term."""
    return sums[0] / rows


def _ratio(sums: Sequence[float], rows: int) -> float:
    signal, noise = sums
    if signal == 0:
        return math.inf if noise > 0 else 0.0
    return noise / signal


OUTPUT_METRICS: Final[dict[str, OutputMetric]] = {
    m.name: m
    for m in (
        OutputMetric("kl", "nats per row", True, _kl_rows, mean),
        OutputMetric("sqnr", "noise to signal", True, _square_rows, _ratio),
        OutputMetric("mse", "mean squared error", True, _mean_square_rows, mean),
        OutputMetric("cosine", "1 - cosine", False, _angle_rows, mean),
    )
}
