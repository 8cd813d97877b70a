"""pyquant: int8 and int4 Linear layers that run in integers, exactly, on CPUs and NVIDIA GPUs."""

import pyquant.cli.start  # first: `pyquant --help` does not wait for torch
from pyquant.calibrate.collectors import (
    EntropyCalibrator,
    HistogramCollector,
    MaxCalibrator,
    MSECalibrator,
    PercentileCalibrator,
)
from pyquant.core.presets import (
    FP16,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A16,
    W4A4Dynamic,
    W4A8Dynamic,
    W4A8TwoLevel,
    W4A8TwoLevelDynamic,
    W8A8Dynamic,
    scheme_from_name,
)
from pyquant.core.qtensor import PackedQTensor, QTensor
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import (
    ArgumentError,
    CalibrationError,
    CheckpointError,
    InfeasibleError,
    NativeLibraryError,
    NonFiniteError,
    PyquantError,
    QuantizationWarning,
    SchemeError,
    UnsupportedError,
)
from pyquant.float_matrices import FloatMatrix, trace_floats
from pyquant.io.pretrained import load_pretrained, load_quantized_, quantize_checkpoint_, save_pretrained
from pyquant.mixed_precision.latency.measure import load_latency, measure_latency
from pyquant.mixed_precision.loss.layer_errors import error_report
from pyquant.mixed_precision.loss.sensitivity import sensitivity
from pyquant.mixed_precision.plan import Plan
from pyquant.mixed_precision.search import search
from pyquant.nn.blocks import QuantBasicBlock, QuantBottleneck
from pyquant.nn.chain import Dequantize, QResidualAdd, QSequential, Quantize, Residual
from pyquant.nn.dequantize import dequantize_
from pyquant.nn.expert_rules import ExpertsRule, register_experts
from pyquant.nn.experts import QExperts
from pyquant.nn.fold import fold_batch_norm_
from pyquant.nn.forms import expose_linears_, register_linear_form
from pyquant.nn.fuse import fuse_
from pyquant.nn.fuse_rules import register_batch_norm, register_fusion
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.nn.kernel_info import KernelInfo
from pyquant.nn.link import ChainRecord, chain_report, link_, register_link
from pyquant.nn.match import FqnConfig
from pyquant.nn.merge import MergeRecord, merge_, merge_report
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.quicker import CallTime, LayerChoice
from pyquant.nn.report import LayerReport, quantization_report
from pyquant.nn.speed import LayerSpeed, compare_speed
from pyquant.ops import set_checks, set_strict
from pyquant.ptq import (
    QuantizationCalibrator,
    QuantizedMapping,
    QuantizedMetadata,
    ReplacementAction,
    SelectiveQuantizer,
    SkipQuantization,
    calibrate_recipe_,
    prepare_,
    quantize_recipe_,
    register_quantized_module,
)
from pyquant.ptq.auto import AutoReport, auto_
from pyquant.ptq.improve.bias_correction import bias_correction_
from pyquant.ptq.improve.equalize import equalize_
from pyquant.ptq.improve.gptq import gptq_
from pyquant.ptq.improve.gptq_codes import gptq_codes
from pyquant.ptq.improve.learned_rotation import LearnedRotation, learn_rotation_
from pyquant.ptq.improve.learned_rounding import learn_rounding_
from pyquant.ptq.improve.rotate import rotate_
from pyquant.ptq.improve.rotate_rules import RotatedHeads, RotationSpec, register_rotation
from pyquant.ptq.improve.scale_search import ScaleSearch, search_scales_
from pyquant.ptq.improve.smooth import smooth_
from pyquant.ptq.improve.smooth_rules import register_smoothing
from pyquant.ptq.quantize import quantize_
from pyquant.ptq.shards import quantize_files
from pyquant.qat.distill import distillation
from pyquant.qat.finetune import finetune
from pyquant.qat.guards import QATWarning
from pyquant.qat.monitor import QATMonitor
from pyquant.qat.precision import LearnedPrecision
from pyquant.qat.prepare import prepare_qat_
from pyquant.qat.recipe import QATRecipe, QATRecipeModification, QATRecipeModificationCallback
from pyquant.recipe import Recipe, RecipeNotice
from pyquant.recipe.recommended import recommended
from pyquant.report.records.latency import LatencyTable
from pyquant.simulate.insert import convert_, insert_fake_quantize_, remove_fake_quantize_
from pyquant.simulate.torch_operators import torch_fake_quantize

__version__ = pyquant.cli.start.VERSION

__all__ = [
    "FP16",
    "W4A4",
    "W4A8",
    "W4A16",
    "W8A8",
    "W8A16",
    "ArgumentError",
    "AutoReport",
    "CalibrationError",
    "CallTime",
    "ChainRecord",
    "CheckpointError",
    "Dequantize",
    "EntropyCalibrator",
    "ExpertsRule",
    "FloatMatrix",
    "FqnConfig",
    "HadamardLinear",
    "HistogramCollector",
    "InfeasibleError",
    "KernelInfo",
    "LatencyTable",
    "LayerChoice",
    "LayerReport",
    "LayerSpeed",
    "LearnedPrecision",
    "LearnedRotation",
    "MSECalibrator",
    "MaxCalibrator",
    "MergeRecord",
    "NativeLibraryError",
    "NonFiniteError",
    "PackedQTensor",
    "PercentileCalibrator",
    "Plan",
    "PyquantError",
    "QATMonitor",
    "QATRecipe",
    "QATRecipeModification",
    "QATRecipeModificationCallback",
    "QATWarning",
    "QConv2d",
    "QEmbedding",
    "QExperts",
    "QLinear",
    "QResidualAdd",
    "QScheme",
    "QSequential",
    "QTensor",
    "QuantBasicBlock",
    "QuantBottleneck",
    "QuantizationCalibrator",
    "QuantizationWarning",
    "Quantize",
    "QuantizedMapping",
    "QuantizedMetadata",
    "Recipe",
    "RecipeNotice",
    "ReplacementAction",
    "Residual",
    "RotatedHeads",
    "RotationSpec",
    "ScaleSearch",
    "SchemeError",
    "SelectiveQuantizer",
    "SkipQuantization",
    "TensorScheme",
    "UnsupportedError",
    "W4A4Dynamic",
    "W4A8Dynamic",
    "W4A8TwoLevel",
    "W4A8TwoLevelDynamic",
    "W8A8Dynamic",
    "auto_",
    "bias_correction_",
    "calibrate_recipe_",
    "chain_report",
    "compare_speed",
    "convert_",
    "dequantize_",
    "distillation",
    "equalize_",
    "error_report",
    "expose_linears_",
    "finetune",
    "fold_batch_norm_",
    "fuse_",
    "gptq_",
    "gptq_codes",
    "insert_fake_quantize_",
    "learn_rotation_",
    "learn_rounding_",
    "link_",
    "load_latency",
    "load_pretrained",
    "load_quantized_",
    "measure_latency",
    "merge_",
    "merge_report",
    "prepare_",
    "prepare_qat_",
    "quantization_report",
    "quantize_",
    "quantize_checkpoint_",
    "quantize_files",
    "quantize_recipe_",
    "recommended",
    "register_batch_norm",
    "register_experts",
    "register_fusion",
    "register_linear_form",
    "register_link",
    "register_quantized_module",
    "register_rotation",
    "register_smoothing",
    "remove_fake_quantize_",
    "rotate_",
    "save_pretrained",
    "scheme_from_name",
    "search",
    "search_scales_",
    "sensitivity",
    "set_checks",
    "set_strict",
    "smooth_",
    "torch_fake_quantize",
    "trace_floats",
]


def __getattr__(name: str) -> object:
    if name == "doctor":  # kept out of the import path of everybody else
        from pyquant.diagnosis import doctor

        return doctor
    raise AttributeError(f"module 'pyquant' has no attribute {name!r}")
