"""How far outputs are from reference outputs: KL, noise to signal, mean squared error, cosine; functions of tensors.

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

    metric   a name ('kl', 'sqnr', 'mse', 'cosine') or an OutputMetric.

    Example:
        >>> distance = Accumulator("mse")
        >>> distance.add(torch.zeros(2, 2), torch.ones(2, 2))
        >>> distance.add(torch.zeros(1, 2), torch.zeros(1, 2))
        >>> round(distance.value(), 3)
        0.667
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


def kl(reference_logits: Tensor, logits: Tensor) -> float:
    """Kullback-Leibler divergence KL(softmax(reference) || softmax(logits)) of the last dimension, mean of the rows.

    reference_logits, logits  float [..., classes], classes >= 2, equal shapes.
    ->  nats a row (a token, a sample), >= 0 up to rounding; computed in float64.
    Raises ArgumentError, NonFiniteError.

    Example:
        >>> round(kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3.0)]])), 4)
        0.1438
    """
    return _single("kl", reference_logits, logits)


def noise_to_signal(reference: Tensor, output: Tensor) -> float:
    """Sum of squares of the difference over that of the reference: 1 / SQNR, which adds up over independent errors.

    reference, output  float [..., columns].
    ->  ratio, >= 0; a reference that is all zero gives 0 where the output is too, else infinity.
    Raises ArgumentError, NonFiniteError.

    Example:
        >>> noise_to_signal(torch.tensor([2.0, 0.0]), torch.tensor([2.0, 1.0]))
        0.25
    """
    return _single("sqnr", reference, output)


def sqnr_db(reference: Tensor, output: Tensor) -> float:
    """Signal to quantisation noise in decibel: -10 log10(noise_to_signal).

    reference, output  float [..., columns].
    ->  dB; infinity where they are equal, minus infinity where only the reference is all zero.
    Raises ArgumentError, NonFiniteError.

    Example:
        >>> sqnr_db(torch.tensor([10.0]), torch.tensor([9.0]))
        20.0
    """
    return to_db(noise_to_signal(reference, output))


def mse(reference: Tensor, output: Tensor) -> float:
    """Mean squared difference of all elements.

    reference, output  float [..., columns].
    ->  square of their unit, >= 0.
    Raises ArgumentError, NonFiniteError.

    Example:
        >>> mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        2.0
    """
    return _single("mse", reference, output)


def cosine(reference: Tensor, output: Tensor) -> float:
    """Cosine of the angle between rows, mean of the rows.

    reference, output  float [..., columns].
    ->  in [-1, 1]; a row of zeros has cosine 1 to another one, 0 to anything else.
    Raises ArgumentError, NonFiniteError.

    Example:
        >>> cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]]))
        0.5
    """
    return 1.0 - _single("cosine", reference, output)


def to_db(ratio: float) -> float:
    """A noise-to-signal ratio as dB of signal to noise.

    Example:
        >>> to_db(0.01), to_db(0.0)
        (20.0, inf)
    """
    if ratio == 0:
        return math.inf
    return -math.inf if ratio == math.inf else -10 * math.log10(ratio)


def find_metric(name: str) -> OutputMetric:
    """The metric of that name. Raises ArgumentError for an unknown one.

    Example:
        >>> find_metric("kl").unit
        'nats per row'
    """
    return OUTPUT_METRICS[arguments.one_of("metric", name, OUTPUT_METRICS)]


def _single(name: str, reference: Tensor, output: Tensor) -> float:
    accumulator = Accumulator(name)
    accumulator.add(reference, output)
    return accumulator.value()


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


def _kl_rows(reference: Tensor, output: Tensor) -> Tensor:
    if reference.shape[1] < 2:
        allowed = "'mse' or 'sqnr', or logits of two classes and more in the last dimension"
        raise ArgumentError("metric", f"'kl' of outputs [..., {reference.shape[1]}]", allowed)
    log_p, log_q = torch.log_softmax(reference, -1), torch.log_softmax(output, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True)


def _square_rows(reference: Tensor, output: Tensor) -> Tensor:
    return torch.stack([reference.square().sum(-1), (output - reference).square().sum(-1)], -1)


def _mean_square_rows(reference: Tensor, output: Tensor) -> Tensor:
    return (output - reference).square().mean(-1, keepdim=True)


def _angle_rows(reference: Tensor, output: Tensor) -> Tensor:
    """1 - cosine as half the squared distance of unit vectors: exact also where it is tiny."""
    a, b = (t / t.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny) for t in (reference, output))
    distance = (a - b).square().sum(-1, keepdim=True) / 2
    return torch.where((a == 0).all(-1, keepdim=True) ^ (b == 0).all(-1, keepdim=True), 1.0, distance)


def _mean(sums: Sequence[float], rows: int) -> float:
    return sums[0] / rows


def _ratio(sums: Sequence[float], rows: int) -> float:
    signal, noise = sums
    if signal == 0:
        return math.inf if noise > 0 else 0.0
    return noise / signal


OUTPUT_METRICS: Final[dict[str, OutputMetric]] = {
    m.name: m
    for m in (
        OutputMetric("kl", "nats per row", True, _kl_rows, _mean),
        OutputMetric("sqnr", "noise to signal", True, _square_rows, _ratio),
        OutputMetric("mse", "mean squared error", True, _mean_square_rows, _mean),
        OutputMetric("cosine", "1 - cosine", False, _angle_rows, _mean),
    )
}
