"""The executable specification of docs/numerics.md in plain torch: what every kernel must equal and what
runs where there is none.

Every float step is one torch operation on float32 tensors, so it rounds once. Never a Python number as divisor: torch
turns division by a scalar into multiplication by its reciprocal on some devices.
"""

from pyquant.numerics.epilogue import activate, finish, store
from pyquant.numerics.gemm import accumulate, gemm, gemm_s4s4, gemm_s8s4, gemm_s8s8, integer_matmul, is_per_token
from pyquant.numerics.linear import float_linear, qlinear_reference, weight_only_linear
from pyquant.numerics.pack import pack_int4, unpack_int4
from pyquant.numerics.qparams import qparams_from_range, scale_from_amax, scale_recip
from pyquant.numerics.quantize import code_from_real, dequantize, quantize, quantize_dynamic

__all__ = [
    "accumulate",
    "activate",
    "code_from_real",
    "dequantize",
    "finish",
    "float_linear",
    "gemm",
    "gemm_s4s4",
    "gemm_s8s4",
    "gemm_s8s8",
    "integer_matmul",
    "is_per_token",
    "pack_int4",
    "qlinear_reference",
    "qparams_from_range",
    "quantize",
    "quantize_dynamic",
    "scale_from_amax",
    "scale_recip",
    "store",
    "unpack_int4",
    "weight_only_linear",
]
