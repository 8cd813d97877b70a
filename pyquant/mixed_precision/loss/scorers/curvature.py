"""The label-free losses as second-order forms: what to draw, and by what to multiply, for metrics with gradients.

Near the float outputs y0 every loss is E[(u . dy)^2] * factor, u drawn per row: for 'kl' u is the gradient of
-log softmax(y)[label] with the label drawn from the model's own softmax (factor 1/2), for 'mse' and 'sqnr' u is normal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.mixed_precision.loss.metrics import check_columns


@dataclass(frozen=True)
class Curvature:
    """One label-free loss.

    drawn     (outputs [rows, columns], generator) -> scalar whose gradient is the sum of the rows' u.
    loss      outputs [rows, columns] with a graph -> scalar, the sum over rows of the distance from themselves, without
              a gradient but with the right second derivative.
    weight    outputs -> by what a sum over rows is divided, summed over batches.
    factor    of the squares.
    """

    drawn: Callable[[Tensor, torch.Generator], Tensor]
    loss: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], float]
    factor: float


def find_curvature(name: str) -> Curvature:
    """That of an output metric. Raises ArgumentError for those that have none."""
    if name not in _CURVATURES:
        raise ArgumentError("loss", repr(name), ", ".join(map(repr, _CURVATURES)) + ", for metrics with gradients")
    return _CURVATURES[name]


def rows_of(outputs: Tensor) -> Tensor:
    """[..., columns] -> [rows, columns]."""
    return outputs.reshape(-1, outputs.shape[-1])


def joined(vectors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Dot products of one group, one for each position of a layer, summed where they act on the same output row.

    vectors  [positions] of every layer and call; positions of one sample lie side by side.
    rows     rows of the model's output. A layer with n positions for each of them (pixels or tokens of a sample with
             one output) gives one sum a row; with as many, or others, each position counts for itself.
    ->       independent terms, to be squared.
    """
    by_length: dict[int, Tensor] = {}
    for vector in vectors:
        if vector.numel() > rows and vector.numel() % rows == 0:
            vector = vector.reshape(rows, -1).sum(1)
        total = by_length.get(vector.numel())
        by_length[vector.numel()] = vector if total is None else total + vector
    return list(by_length.values())


def _finite(numbers: Tensor) -> Tensor:
    if not bool(numbers.isfinite().all()):
        raise NonFiniteError("model", "NaN or infinity in its outputs", "finite outputs")
    return numbers


def _label_loss(outputs: Tensor, generator: torch.Generator) -> Tensor:
    check_columns("kl", outputs.shape[-1])
    probabilities = _finite(torch.softmax(outputs.detach().double(), -1))  # of a masked column: 0
    labels = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    return F.cross_entropy(outputs.double(), labels, reduction="sum")


def _normal_product(outputs: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(outputs.shape, generator=generator, device=outputs.device, dtype=torch.float64)
    return (noise * _finite(outputs).double()).sum()


def _kl_from_itself(outputs: Tensor) -> Tensor:
    check_columns("kl", outputs.shape[-1])
    log_p = torch.log_softmax(_finite(outputs).double(), -1)
    old = log_p.detach()
    return (old.exp() * (old - log_p)).sum()


def _squares_from_itself(outputs: Tensor) -> Tensor:
    return (_finite(outputs).double() - outputs.detach().double()).square().sum()


def _signal(outputs: Tensor) -> float:
    return outputs.detach().double().square().sum().item()


_CURVATURES: Final = {
    "kl": Curvature(_label_loss, _kl_from_itself, lambda outputs: float(outputs.shape[0]), 0.5),
    "mse": Curvature(_normal_product, _squares_from_itself, lambda outputs: float(outputs.numel()), 1.0),
    "sqnr": Curvature(_normal_product, _squares_from_itself, _signal, 1.0),
}
