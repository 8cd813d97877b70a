"""What reconstruction knows of a layer's inputs: second moments, and how far they are from the float model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyquant.ptq.blockwise.stage import Stage
from pyquant.ptq.improve.matrix import Layer, matrix_of, rounded_input, rows_of


@dataclass
class Moments:
    """Sums over the rows x [K] that a layer multiplies with its weights, float64; with `cross`, over rows x' of the
    float model too.

    hessian    [K, K]: x x^T.     cross   [K, K]: (x' - x) x^T, or None.
    total      [K]: x.     moved   [K]: x' - x.     rows   how many.
    """

    hessian: Tensor
    cross: Tensor | None
    total: Tensor
    moved: Tensor
    rows: int = 0


def moments_of(stage: Stage, layer: Layer, calls: int, batches: int, *, cross: bool) -> Moments:
    """The moments of a layer over the first `batches` batches. cross: also against the float model, which costs a pass
    of it for each batch; none where the two give the layer other numbers of rows, as routers of experts do."""
    device, k = layer.weight.device, matrix_of(layer).shape[1]
    zeros = {"dtype": torch.float64, "device": device}
    found = Moments(
        torch.zeros(k, k, **zeros),  # type: ignore[arg-type]
        torch.zeros(k, k, **zeros) if cross else None,  # type: ignore[arg-type]
        torch.zeros(k, **zeros),  # type: ignore[arg-type]
        torch.zeros(k, **zeros),  # type: ignore[arg-type]
    )
    floats: list[Tensor] = []

    def see_float(x: Tensor, _: Tensor) -> None:
        floats.append(x)

    def see(x: Tensor, _: Tensor) -> None:
        rows = rows_of(layer, rounded_input(layer, x)).float()
        found.hessian.add_(rows.t() @ rows)
        if found.cross is not None and (not floats or floats[0].shape != x.shape):
            found.cross = None
        if found.cross is not None:
            moved = rows_of(layer, floats.pop(0)).float() - rows
            found.cross.add_(moved.t() @ rows)
            found.total.add_(rows.sum(0))
            found.moved.add_(moved.sum(0))
            found.rows += rows.shape[0]

    for i in range(batches):
        if found.cross is not None:
            floats.clear()
            with stage.as_float():
                stage.floats.watch(layer, calls, see_float, i, i + 1)
        stage.rounded.watch(layer, calls, see, i, i + 1)
    return found


def targets(matrix: Tensor, moments: Moments, damp: float) -> Tensor:
    """The weights [N, K], float64, whose products with the rounded model's inputs are nearest, in squares, to those of
    `matrix` with the float model's: W + W (sum (x' - x) x^T) (sum x x^T + damping)^-1."""
    hessian, cross = moments.hessian, moments.cross
    if cross is None:
        return matrix.double()
    mean = float(hessian.diagonal().mean())
    eye = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    for factor in (1, 10, 100, 1000):
        lower, info = torch.linalg.cholesky_ex(hessian + eye * max(damp * factor * mean, 1e-300))
        if int(info) == 0:
            shift = torch.cholesky_solve(cross.t(), lower).t()
            return matrix.double() + matrix.double() @ shift
    return matrix.double()


def bias_shift(matrix: Tensor, rounded: Tensor, moments: Moments) -> Tensor:
    """float64 [N]: what a bias must gain for the mean of every output to be the float model's, once `matrix` is rounded
    to `rounded`."""
    rows = max(moments.rows, 1)
    seen = moments.total / rows
    return matrix.double() @ (seen + moments.moved / rows) - rounded.double() @ seen
