"""The executable specification of docs/numerics.md in plain torch: what every kernel must equal and what
runs where there is none.

A function with the name of an op takes and gives what pyquant.ops says of that; values are not checked here. Every
float step is one torch operation on float32 tensors, so it rounds once. Never a Python number as divisor: torch turns
division by a scalar into multiplication by its reciprocal on some devices.
"""

from pyquant.numerics.epilogue import activate, finish, store
from pyquant.numerics.fake_quantize import (
    fake_quantize,
    fake_quantize_backward,
    fake_quantize_dynamic,
    fake_quantize_lsq_backward,
    pack_mask,
    sum_in_blocks,
    unpack_mask,
)
from pyquant.numerics.gemm import (
    accumulate,
    gemm,
    gemm_s4s4,
    gemm_s8s4,
    gemm_s8s8,
    integer_matmul,
    is_per_token,
    product,
)
from pyquant.numerics.hadamard import hadamard_backward, hadamard_quantize, hadamard_transform
from pyquant.numerics.histogram import magnitude_edges, magnitude_exponent, magnitude_histogram, widen_histogram
from pyquant.numerics.linear import float_linear, qlinear_reference, weight_only_linear
from pyquant.numerics.norm import (
    activation_mul,
    activation_mul_quantize,
    add_layer_norm_quantize,
    add_rms_norm_quantize,
    layer_norm,
    layer_norm_quantize,
    rms_norm,
    rms_norm_quantize,
    silu_mul,
    silu_mul_quantize,
    sum_in_lanes,
)
from pyquant.numerics.pack import pack, pack_int4, unpack, unpack_int4
from pyquant.numerics.qparams import qparams_from_range, scale_from_amax, scale_recip
from pyquant.numerics.quantize import code_from_real, dequantize, quantize, quantize_dynamic
from pyquant.numerics.two_level import codes_of_products, largest_step, one_level, split_scales, two_level_scales

__all__ = [
    "accumulate",
    "activate",
    "activation_mul",
    "activation_mul_quantize",
    "add_layer_norm_quantize",
    "add_rms_norm_quantize",
    "code_from_real",
    "codes_of_products",
    "dequantize",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_dynamic",
    "fake_quantize_lsq_backward",
    "finish",
    "float_linear",
    "gemm",
    "gemm_s4s4",
    "gemm_s8s4",
    "gemm_s8s8",
    "hadamard_backward",
    "hadamard_quantize",
    "hadamard_transform",
    "integer_matmul",
    "is_per_token",
    "largest_step",
    "layer_norm",
    "layer_norm_quantize",
    "magnitude_edges",
    "magnitude_exponent",
    "magnitude_histogram",
    "one_level",
    "pack",
    "pack_int4",
    "pack_mask",
    "product",
    "qlinear_reference",
    "qparams_from_range",
    "quantize",
    "quantize_dynamic",
    "rms_norm",
    "rms_norm_quantize",
    "scale_from_amax",
    "scale_recip",
    "silu_mul",
    "silu_mul_quantize",
    "split_scales",
    "store",
    "sum_in_blocks",
    "sum_in_lanes",
    "two_level_scales",
    "unpack",
    "unpack_int4",
    "unpack_mask",
    "weight_only_linear",
    "widen_histogram",
]
