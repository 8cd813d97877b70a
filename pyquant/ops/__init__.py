"""torch.ops.pyquant.*: schemas, shape rules, gradients, compiled or Python implementations, typed wrappers."""

from pyquant.core.names import ACTIVATIONS
from pyquant.ops.conv import qconv2d
from pyquant.ops.fake_quantize import (
    fake_quantize,
    fake_quantize_backward,
    fake_quantize_backward_,
    fake_quantize_dynamic,
    fake_quantize_dynamic_out,
    fake_quantize_lsq_backward,
    fake_quantize_out,
)
from pyquant.ops.functional import (
    activation_mul_quantize,
    add_layer_norm_quantize,
    add_rms_norm_quantize,
    dequantize,
    hadamard_quantize,
    hadamard_transform,
    layer_norm_quantize,
    magnitude_histogram,
    pack_int4,
    quantize,
    quantize_dynamic,
    rms_norm_quantize,
    silu_mul_quantize,
    unpack_int4,
)
from pyquant.ops.linear import (
    float_linear,
    gemm,
    gemm_s4s4,
    gemm_s8s4,
    gemm_s8s8,
    pack_linear,
    qlinear,
    unpack_linear,
    weight_only_linear,
)
from pyquant.ops.load import holds_row, layout_for, native_available, packs_int4, why_not_native
from pyquant.ops.plan import Kernel, kernels
from pyquant.ops.spec import LinearSpec
from pyquant.ops.strict import set_strict
from pyquant.ops.values import checks_enabled, set_checks

__all__ = [
    "ACTIVATIONS",
    "Kernel",
    "LinearSpec",
    "activation_mul_quantize",
    "add_layer_norm_quantize",
    "add_rms_norm_quantize",
    "checks_enabled",
    "dequantize",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_backward_",
    "fake_quantize_dynamic",
    "fake_quantize_dynamic_out",
    "fake_quantize_lsq_backward",
    "fake_quantize_out",
    "float_linear",
    "gemm",
    "gemm_s4s4",
    "gemm_s8s4",
    "gemm_s8s8",
    "hadamard_quantize",
    "hadamard_transform",
    "holds_row",
    "kernels",
    "layer_norm_quantize",
    "layout_for",
    "magnitude_histogram",
    "native_available",
    "pack_int4",
    "pack_linear",
    "packs_int4",
    "qconv2d",
    "qlinear",
    "quantize",
    "quantize_dynamic",
    "rms_norm_quantize",
    "set_checks",
    "set_strict",
    "silu_mul_quantize",
    "unpack_int4",
    "unpack_linear",
    "weight_only_linear",
    "why_not_native",
]
