"""Whether a metric seems to have been taken for one of the other direction: an error for an accuracy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

from pyquant.errors import QuantizationWarning
from pyquant.mixed_precision.loss.evaluate import TaskMetric

_FEW: Final = 3  # fewer configurations say nothing
_NOISE: Final = 1e-3  # a share of the float model's metric: what is less is no difference
_MUCH: Final = 1e-2


def warn_of_direction(task: TaskMetric, values: Sequence[float]) -> None:
    """A QuantizationWarning where lowered configurations are better than the float model by more than noise.

    values  the metric of every lowered configuration that was evaluated.
    """
    gains = [-task.loss_of(value) / max(abs(task.baseline), 1e-300) for value in values]
    if len(gains) < _FEW or min(gains) < -_NOISE or max(gains) < _MUCH:
        return
    better = [gain for gain in gains if gain > _NOISE]
    if 2 * len(better) < len(gains):
        return
    best = max(values) if task.higher_is_better else min(values)
    option = "higher_is_better=False (--lower-is-better)" if task.higher_is_better else "higher_is_better=True"
    less = "less" if task.higher_is_better else "more"
    warnings.warn(
        f"none of the {len(gains)} lowered configurations is worse than the float model by eval_fn, and "
        f"{len(better)} are better: {best:.6g} where the float model has {task.baseline:.6g}. Where {less} of it is "
        f"better, {option} is missing",
        QuantizationWarning,
        stacklevel=4,
    )
