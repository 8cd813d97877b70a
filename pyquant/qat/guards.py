"""Warnings, before the first step, of starting points from which training is known to go badly."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from torch import Tensor, nn

from pyquant.core.names import listed
from pyquant.errors import ArgumentError
from pyquant.simulate.fake_quantize import FakeQuantize


class QATWarning(UserWarning):
    """Training runs, but from a starting point that is known to train badly."""


def check_trainable(ptq_only: bool) -> None:
    """Raise ArgumentError where a recipe, or the one that a model was prepared by, wants no training."""
    if ptq_only:
        raise ArgumentError("recipe.ptq_only", "True", "False, in the recipe of a model that is to be trained")


def warn_of_bad_starts(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """One QATWarning for static ranges that were never calibrated, one for 4-bit layers with untrained weights."""
    uncalibrated: list[str] = []
    untrained: list[str] = []
    few_bits = False
    for name, layer in layers:
        fakes: dict[str, FakeQuantize] = layer.fake_quantizers()  # type: ignore[operator]
        missing = [f"{name}.{tensor}" for tensor, fake in fakes.items() if not fake.is_calibrated]
        uncalibrated += missing
        has_four = any(fake.scheme.bits <= 4 for fake in fakes.values())
        few_bits |= has_four and bool(missing)
        weight = getattr(layer, "weight", None)
        if has_four and isinstance(weight, Tensor) and looks_untrained(weight.detach()):
            untrained.append(name)
    if uncalibrated:
        advice = "calibrate first (QuantizationCalibrator), as forward refuses a static layer without a range"
        if few_bits:
            advice += "; with 4 bits the range decides where training begins, so take its best calibration"
        _warn(f"static ranges without calibration: {listed(uncalibrated, 5)}; {advice}")
    if untrained:
        advice = "4 bits train badly from random weights: start from a trained model, calibrated after training"
        _warn(
            f"4-bit layers whose weights look untrained (still as PyTorch draws them): {listed(untrained, 5)}; {advice}"
        )


def looks_untrained(weight: Tensor) -> bool:
    """Whether a weight [N, K, ...] is distributed as nn.Linear and nn.Conv2d draw it: uniform in +-1 / sqrt(K).
    Tensors below 256 elements say too little: False."""
    if weight.dim() < 2 or weight.numel() < 256 or weight.is_meta:
        return False
    limit = 1.0 / math.sqrt(weight[0].numel())
    flat = weight.float().flatten()
    inside = flat.abs() / limit
    # Of a uniform |w| / limit: mean 1/2, mean square 1/3, none above 1. The margins are five standard errors: of a
    # million fresh layers one or two fall outside.
    margin = 5.0 / math.sqrt(flat.numel())
    return bool(
        inside.max() <= 1.0 + 2**-6
        and abs(inside.mean() - 0.5) < 0.29 * margin
        and abs(inside.square().mean() - 1 / 3) < 0.3 * margin
        and abs(flat.mean() / limit) < 0.58 * margin
    )


def _warn(text: str) -> None:
    warnings.warn(text, QATWarning, stacklevel=4)
