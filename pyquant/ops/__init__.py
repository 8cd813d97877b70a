"""torch.ops.pyquant.*: schemas, shape rules, gradients, compiled or Python implementations, typed wrappers."""

from pyquant.ops.functional import (
    dequantize,
    float_linear,
    gemm_s4s4,
    gemm_s8s4,
    gemm_s8s8,
    pack_int4,
    pack_linear,
    qlinear,
    quantize,
    quantize_dynamic,
    unpack_int4,
    unpack_linear,
    weight_only_linear,
)
from pyquant.ops.load import layout_for, native_available, why_not_native
from pyquant.ops.spec import ACTIVATIONS, LinearSpec
from pyquant.ops.strict import set_strict
from pyquant.ops.values import checks_enabled, set_checks

__all__ = [
    "ACTIVATIONS", "LinearSpec", "checks_enabled", "dequantize", "float_linear", "gemm_s4s4", "gemm_s8s4", "gemm_s8s8",
    "layout_for", "native_available", "pack_int4", "pack_linear", "qlinear", "quantize", "quantize_dynamic",
    "set_checks", "set_strict", "unpack_int4", "unpack_linear", "weight_only_linear", "why_not_native",
]  # fmt: skip
