"""Selective quantisation after training: rules by layer, calibration, and both from a recipe."""

from pyquant.ptq.calibrator import QuantizationCalibrator
from pyquant.ptq.mapping import (
    QuantizedMapping,
    QuantizedMetadata,
    ReplacementAction,
    SkipQuantization,
    register_quantized_module,
)
from pyquant.ptq.run import calibrate_recipe_, prepare_, quantize_recipe_
from pyquant.ptq.selective import SelectiveQuantizer

__all__ = [
    "QuantizationCalibrator",
    "QuantizedMapping",
    "QuantizedMetadata",
    "ReplacementAction",
    "SelectiveQuantizer",
    "SkipQuantization",
    "calibrate_recipe_",
    "prepare_",
    "quantize_recipe_",
    "register_quantized_module",
]
