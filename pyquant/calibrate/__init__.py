"""From data to ranges: statistics that stream and merge, and the methods that choose a range from them."""

from pyquant.calibrate.collectors import (
    EntropyCalibrator,
    HistogramCollector,
    MaxCalibrator,
    MSECalibrator,
    PercentileCalibrator,
)
from pyquant.calibrate.compare import Comparison, compare, histogram_methods, linear_histogram, signed_histogram
from pyquant.calibrate.methods.fixed import GivenRange
from pyquant.calibrate.padding import counted, counting_padding
from pyquant.calibrate.registry import (
    Method,
    Range,
    calibrator,
    compute_range,
    methods,
    new_statistics,
    range_to_qparams,
)
from pyquant.calibrate.run import CalibrationTarget, run_calibration
from pyquant.calibrate.statistics import HistogramStatistics, RangeStatistics
from pyquant.calibrate.weights import weight_qparams, weight_range

__all__ = [
    "CalibrationTarget",
    "Comparison",
    "EntropyCalibrator",
    "GivenRange",
    "HistogramCollector",
    "HistogramStatistics",
    "MSECalibrator",
    "MaxCalibrator",
    "Method",
    "PercentileCalibrator",
    "Range",
    "RangeStatistics",
    "calibrator",
    "compare",
    "compute_range",
    "counted",
    "counting_padding",
    "histogram_methods",
    "linear_histogram",
    "methods",
    "new_statistics",
    "range_to_qparams",
    "run_calibration",
    "signed_histogram",
    "weight_qparams",
    "weight_range",
]
