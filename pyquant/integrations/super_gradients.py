"""SuperGradients' names for quantisation, without the training framework and without pytorch_quantization.

from pyquant.integrations.super_gradients import SelectiveQuantizer, QuantizationCalibrator
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from pyquant.errors import ArgumentError
from pyquant.nn.chain import Residual
from pyquant.ptq import (
    QuantizationCalibrator,
    QuantizedMapping,
    QuantizedMetadata,
    ReplacementAction,
    SelectiveQuantizer,
    SkipQuantization,
    register_quantized_module,
)
from pyquant.qat.recipe import QATRecipeModificationCallback

__all__ = [
    "QATRecipeModificationCallback",
    "QuantResidual",
    "QuantSkipConnection",
    "QuantizationCalibrator",
    "QuantizedMapping",
    "QuantizedMetadata",
    "ReplacementAction",
    "SelectiveQuantizer",
    "SkipQuantization",
    "ptq",
    "register_quantized_module",
]


# The original quantises its input itself; here it marks the branch, and SelectiveQuantizer makes it quantise.
QuantResidual = Residual
QuantSkipConnection = QuantResidual


def ptq(
    model: nn.Module,
    selective_quantizer: SelectiveQuantizer | None = None,
    calibration_loader: Iterable[Any] | None = None,
    calibration_method: str = "percentile",
    calibration_batches: int = 16,
    calibration_percentile: float = 99.99,
    calibration_verbose: bool = False,
) -> nn.Module:
    """A copy of a model with calibrated fake quantisation, as SuperGradients' function of this name; next convert_.

    selective_quantizer   None: SelectiveQuantizer() with its defaults.
    calibration_loader    batches. Others as in QuantizationCalibrator.calibrate_model.
    ->                    a new model; the argument is unchanged. Raises as the two classes do.

    Example:
        >>> import torch
        >>> model = ptq(nn.Sequential(nn.Linear(4, 2)), None, [torch.ones(2, 4)] * 16, "max")
        >>> type(model[0]).__name__
        'FakeQuantLinear'
    """
    if calibration_loader is None:
        raise ArgumentError("calibration_loader", "None", "batches; quantize_ with a dynamic scheme needs none")
    prepared = copy.deepcopy(model).eval()
    (selective_quantizer or SelectiveQuantizer()).quantize_module(prepared)
    QuantizationCalibrator().calibrate_model(
        prepared,
        calibration_loader,
        calibration_method,
        calibration_batches,
        calibration_percentile,
        verbose=calibration_verbose,
    )
    return prepared
