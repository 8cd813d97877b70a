"""What reconstruction knows of a layer's inputs: second moments, and how far they are from the float model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from pyquant.errors import NonFiniteError
from pyquant.nn.flow import watch_input
from pyquant.ptq.blockwise.stage import Stage
from pyquant.ptq.improve.ldl import Ldl, ldl_of
from pyquant.ptq.improve.matrix import counted_of, matrix_of, rounded_input, rows_of
from pyquant.ptq.improve.replay import Replay
from pyquant.ptq.improve.same_input import checked

_PANEL: Final = 512  # rows of the second moments that are one product; of each only what is right of the diagonal


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
    _known: dict[tuple[float, bool], Ldl] = field(default_factory=dict, repr=False)
    _shift: tuple[float, Tensor] | None = field(default=None, repr=False)

    def ldl(self, damp: float, *, act_order: bool) -> Ldl:
        """The triangles of `hessian`, which must not change any more."""
        if (damp, act_order) not in self._known:
            self._known[damp, act_order] = ldl_of(self.hessian, damp, act_order=act_order)
        return self._known[damp, act_order]

    def moved_by(self, matrix: Tensor, cross: Tensor, damp: float) -> Tensor:
        """matrix cross (hessian + damping)^-1, float64 [N, K]."""
        either = next((ldl for (known, _), ldl in self._known.items() if known == damp), None)
        ldl = either or self.ldl(damp, act_order=False)
        known = None if self._shift is None or self._shift[0] != damp else self._shift[1]
        if known is None and matrix.shape[0] < matrix.shape[1]:
            return ldl.solve(matrix.double() @ cross)
        if known is None:  # fewer rows than the weights have, and the same for every layer that is given these inputs
            known = ldl.solve(cross)
            self._shift = damp, known
        return matrix.double() @ known


def moments_of(stage: Stage, names: Sequence[str], batches: int, *, cross: bool) -> tuple[Moments, list[str]]:
    """The moments of a layer over the first `batches` batches, and the names of those that they are the moments of.

    names   the layer, and layers behind it that may be given the same inputs; that they are is seen in every pass.
    cross   also against the float model, which costs a pass of it for each batch; none where the two give the layer
            other numbers of rows, as routers of experts do.
    """
    layers = [stage.layers[name] for name in names]
    layer, sharing = layers[0], [True] * len(names)
    device, k = layer.weight.device, matrix_of(layer).shape[1]
    zeros = {"dtype": torch.float64, "device": device}
    found = Moments(
        torch.zeros(k, k, **zeros),  # type: ignore[arg-type]
        torch.zeros(k, k, **zeros) if cross else None,  # type: ignore[arg-type]
        torch.zeros(k, **zeros),  # type: ignore[arg-type]
        torch.zeros(k, **zeros),  # type: ignore[arg-type]
    )
    floats: list[Tensor] = []
    at = [0]  # the batch

    def watch(replay: Replay, see: Callable[[Tensor], None], i: int) -> None:
        last = max(at for at, shares in enumerate(sharing) if shares)
        with checked(layers, sharing):
            seen = watch_input(layer, lambda x: see(x.detach()))
            try:
                replay.run_until(layers[last], stage.calls[names[last]], i)
            finally:
                seen.remove()

    def see(x: Tensor) -> None:
        rows = rows_of(layer, counted_of(layer, rounded_input(layer, x))).float()
        if not bool(rows.isfinite().all()):
            raise NonFiniteError("data", f"NaN or infinity in the input of {names[0]}, batch {at[0]}", "finite numbers")
        _add_squares(found.hessian, rows)
        if found.cross is not None and (not floats or floats[0].shape != counted_of(layer, x).shape):
            found.cross = None
        if found.cross is not None:
            moved = rows_of(layer, floats.pop(0)).float() - rows
            found.cross.add_(moved.t() @ rows)
            found.total.add_(rows.sum(0))
            found.moved.add_(moved.sum(0))
            found.rows += rows.shape[0]

    for i in range(batches):
        at[0] = i
        if found.cross is not None:
            floats.clear()
            with stage.as_float():
                watch(
                    stage.floats, lambda x: floats.append(counted_of(layer, x).clone()), i
                )  # the pass goes on, and may change it
        watch(stage.rounded, see, i)
    if k > _PANEL:
        found.hessian.triu_().add_(found.hessian.triu(1).t())
    return found, [name for name, shares in zip(names, sharing, strict=True) if shares]


def _add_squares(hessian: Tensor, rows: Tensor) -> None:
    """Adds rows^T rows, at least on and above the diagonal."""
    for first in range(0, rows.shape[1], _PANEL):
        last = first + _PANEL
        hessian[first:last, first:].add_(rows[:, first:last].t() @ rows[:, first:])


def targets(matrix: Tensor, moments: Moments, damp: float) -> Tensor:
    """The weights [N, K], float64, whose products with the rounded model's inputs are nearest, in squares, to those of
    `matrix` with the float model's: W + W (sum (x' - x) x^T) (sum x x^T + damping)^-1."""
    if moments.cross is None:
        return matrix.double()
    return matrix.double() + moments.moved_by(matrix, moments.cross, damp)


def bias_shift(matrix: Tensor, rounded: Tensor, moments: Moments) -> Tensor:
    """float64 [N]: what a bias must gain for the mean of every output to be the float model's, once `matrix` is rounded
    to `rounded`."""
    rows = max(moments.rows, 1)
    seen = moments.total / rows
    return matrix.double() @ (seen + moments.moved / rows) - rounded.double() @ seen
