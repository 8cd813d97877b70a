"""Every op of the torch.ops.pyquant namespace: one table of schemas.

Two read it. The build (cmake/schemas.py) writes it into libpyquant_torch.so, which defines the ops wherever it is
loaded, so that a C++ program needs no Python; load.py compares the two, and defines what no library did: a source
checkout without a compiler has the same ops. tests/ops/test_contract.py pins the strings.
"""

from __future__ import annotations

from typing import Final

from pyquant.core.dtypes import PRODUCTS

# A type that may be left out is optional and none by default: what equals another default, AOTInductor leaves out of a
# package and puts back as a number that is no type, so that the package cannot be loaded. None is float32 here.
#
# Of a product of codes, gemm_<x><w>; which there are say core/dtypes.py and csrc/core/dtype.h.
PRODUCT: Final = (
    "(Tensor x, Tensor w, Tensor? w_scale=None, Tensor? x_scale=None, Tensor? x_zero_point=None, Tensor? bias=None, "
    "Tensor? residual=None, Tensor? out_scale=None, Tensor? out_zero_point=None, int group_size=0, "
    "str activation='none', float clamp_min=0.0, float clamp_max=0.0, int out_qmin=-127, int out_qmax=127, "
    "ScalarType? out_dtype=None) -> Tensor"
)

_LIMITS = "bool symmetric=True, int qmin=-127, int qmax=127"
_CODES = "(Tensor, Tensor, Tensor)"
_CODES_AND_SUM = "(Tensor, Tensor, Tensor, Tensor)"
_RMS = f"Tensor? weight=None, float eps=1e-06, {_LIMITS}"
_LAYER = f"Tensor? weight=None, Tensor? bias=None, float eps=1e-05, {_LIMITS}"

_GIVEN = "Tensor scale, Tensor? zero_point=None, str granularity='per_tensor', int group_size=0"

OTHERS: Final[dict[str, str]] = {
    "quantize": f"(Tensor x, {_GIVEN}, int qmin=-127, int qmax=127) -> Tensor",
    "quantize_dynamic": f"(Tensor x, str granularity='per_token', int group_size=0, {_LIMITS}) -> {_CODES}",
    "dequantize": f"(Tensor q, {_GIVEN}, ScalarType? out_dtype=None) -> Tensor",
    # codes, scale and zero point per token; the add_ forms also return x + residual
    "rms_norm_quantize": f"(Tensor x, {_RMS}) -> {_CODES}",
    "layer_norm_quantize": f"(Tensor x, {_LAYER}) -> {_CODES}",
    "add_rms_norm_quantize": f"(Tensor x, Tensor residual, {_RMS}) -> {_CODES_AND_SUM}",
    "add_layer_norm_quantize": f"(Tensor x, Tensor residual, {_LAYER}) -> {_CODES_AND_SUM}",
    "silu_mul_quantize": f"(Tensor x, {_LIMITS}) -> {_CODES}",
    "activation_mul_quantize": "(Tensor x, Tensor up, str activation='silu', float clamp_min=0.0, float clamp_max=0.0, "
    f"{_LIMITS}) -> {_CODES}",
    "hadamard_quantize": f"(Tensor x, int block, {_LIMITS}, float? scale=None) -> {_CODES}",
    "hadamard_transform": "(Tensor x, int block, float? scale=None) -> Tensor",
    # fake quantisation; the _out forms write into buffers that a training loop keeps
    "fake_quantize": f"(Tensor x, {_GIVEN}, int qmin=-127, int qmax=127) -> (Tensor, Tensor)",
    "fake_quantize_out": "(Tensor x, Tensor scale, Tensor? zero_point, str granularity, int group_size, int qmin, "
    "int qmax, Tensor(a!) y, Tensor(b!) mask) -> ()",
    "fake_quantize_dynamic": f"(Tensor x, str granularity='per_channel', int group_size=0, {_LIMITS}) -> {_CODES}",
    "fake_quantize_dynamic_out": "(Tensor x, str granularity, int group_size, bool symmetric, int qmin, int qmax, "
    "Tensor(a!) y, Tensor(b!) scale, Tensor(c!) zero_point) -> ()",
    "fake_quantize_backward": "(Tensor grad, Tensor mask) -> Tensor",
    "fake_quantize_backward_": "(Tensor(a!) grad, Tensor mask) -> ()",
    "fake_quantize_lsq_backward": f"(Tensor grad, Tensor x, {_GIVEN}, int qmin=-127, int qmax=127) -> (Tensor, Tensor)",
    "magnitude_histogram": "(Tensor x, int exponent) -> Tensor",
    "pack_int4": "(Tensor q) -> Tensor",
    "unpack_int4": "(Tensor packed, int k) -> Tensor",
    "gemm": PRODUCT.replace(") -> Tensor", ", str kernel='') -> Tensor"),
    "pack_linear": "(Tensor w, Tensor w_scale, Tensor? bias, Tensor? x_scale, Tensor? x_zero_point, Tensor? out_scale, "
    "Tensor? out_zero_point, int[] spec) -> Tensor",
    "unpack_linear": "(Tensor packed, int[] spec) -> Tensor",
    "qlinear": "(Tensor x, Tensor packed, Tensor? residual, int[] spec, ScalarType? out_dtype=None, "
    "Tensor? x_scale=None, Tensor? x_zero_point=None) -> Tensor",
    "qconv2d": "(Tensor x, Tensor packed, Tensor? residual, int[] spec, int[] window, ScalarType? out_dtype=None, "
    "Tensor? x_scale=None, Tensor? x_zero_point=None) -> Tensor",
    "weight_only_linear": "(Tensor x, Tensor w, Tensor w_scale, Tensor? w_zero_point=None, Tensor? bias=None, "
    "Tensor? residual=None, int w_bits=8, int group_size=0, str activation='none', float clamp_min=0.0, "
    "float clamp_max=0.0, ScalarType? out_dtype=None) -> Tensor",
    "float_linear": "(Tensor x, Tensor w, Tensor? bias=None, Tensor? residual=None, str activation='none', "
    "float clamp_min=0.0, float clamp_max=0.0, ScalarType? out_dtype=None) -> Tensor",
}
SCHEMAS: Final[dict[str, str]] = {**OTHERS, **dict.fromkeys(PRODUCTS, PRODUCT)}

# Tags of SCHEMAS: compilers may trace the ops, and choose the strides of their operands, as the ops take any.
TAGS: Final = ("pt2_compliant_tag", "flexible_layout")

# Ops of the compiled library that are another one without a derivative, and have its rules: what Python keeps for a
# derivative costs as much as a small layer.
UNDIFFERENTIATED: Final = {"_weight_only": "weight_only_linear"}

# What only the compiled library has.
NATIVE: Final[dict[str, str]] = {
    **{name: OTHERS[twin] for name, twin in UNDIFFERENTIATED.items()},
    "_packed_bytes": "(int[] spec) -> int",
    "_cpu_info": "() -> str",
    "_cpu_multiply": "(int rows, int quads, int calls) -> int",
    "_cpu_read": "(Tensor x, int times=1) -> float",
    "_fingerprint": "(Tensor x) -> int",
    # of short rows of weights (calibrate/short_rows.py)
    "_least_squares_steps": "(Tensor rows, int qmin, int qmax, Tensor ratios) -> Tensor",
    # rows sorted by layer, those of packed[i] end before ends[i]: qlinear of each, in one call. rows: which rows of x
    # they are, in that order, where x holds floats; kernel: a row of the kernel table, on CUDA
    "_grouped_linear": "(Tensor x, Tensor[] packed, Tensor ends, int[] spec, Tensor? rows=None, Tensor? x_scale=None, "
    "Tensor? x_zero_point=None, ScalarType? out_dtype=None, str kernel='') -> Tensor",
    # the same of weight_only_linear; w_zero_point, bias: one a layer, or none
    "_grouped_weight_only": "(Tensor x, Tensor[] w, Tensor[] w_scale, Tensor[] w_zero_point, Tensor[] bias, "
    "Tensor ends, int w_bits, int group_size, str activation, float clamp_min, float clamp_max, Tensor? rows=None) "
    "-> Tensor",
    "_set_tuned": "(str table) -> str",
    "_tuned_remarks": "() -> str",
}

# What Python alone defines and serves, for compiled graphs (routed.py): rows sorted by expert, counts[i] of them for
# the i-th; rows beyond these are results of zeros. experts: whose layers these are, [] for all; others: the results of
# the other experts so far.
_EXPERTS = "int[] experts=[], Tensor? others=None) -> Tensor"
_FUSED = "str activation, float clamp_min, float clamp_max"
ROUTED: Final[dict[str, str]] = {
    "_routed_linear": "(Tensor x, Tensor counts, Tensor[] packed, int[] spec, ScalarType out_dtype, "
    f"Tensor? x_scale=None, Tensor? x_zero_point=None, {_EXPERTS}",
    "_routed_weight_only": "(Tensor x, Tensor counts, Tensor[] w, Tensor[] w_scale, Tensor[] w_zero_point, "
    f"Tensor[] bias, int n, int w_bits, int group_size, {_FUSED}, {_EXPERTS}",
    "_routed_float": f"(Tensor x, Tensor counts, Tensor[] w, Tensor[] bias, {_FUSED}, ScalarType out_dtype, {_EXPERTS}",
    # torch's own Linear
    "_routed_dense": f"(Tensor x, Tensor counts, Tensor[] w, Tensor[] bias, {_EXPERTS}",
}
