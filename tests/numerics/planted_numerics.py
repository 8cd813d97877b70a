"""Bugs in the executable specification, each one edit, and the law that must notice it."""

# ruff: noqa: E501, ISC004  (a table of source lines)

from __future__ import annotations

import laws
import problems
import torch
from mutants import edit, register

from pyquant import numerics
from pyquant.core.bounds import check_k
from pyquant.core.dtypes import qrange
from pyquant.core.granularity import scale_shape
from pyquant.errors import ArgumentError


def quantizers(seed: int) -> None:
    for offset in range(2):
        for values in problems.VALUES:
            for granularity in laws.GRANULARITIES:
                laws.quantize_dynamic(numerics, values, granularity, seed + offset)
                laws.quantize(numerics, values, granularity, seed + offset)


def parameters(seed: int) -> None:
    from numerics import test_qparams

    test_qparams.test_scale_from_amax(127)
    test_qparams.test_qparams_from_range(-128, 127)


def large_sums(seed: int) -> None:
    laws.large_sums(numerics, seed)


def overflow(seed: int) -> None:
    from numerics.test_gemm import test_store_rounds_half_to_even_and_overflows_to_infinity as check

    check(torch.float16)


def reciprocal(seed: int) -> None:
    from numerics.test_quantize import test_code_uses_the_reciprocal_and_not_a_division

    test_code_uses_the_reciprocal_and_not_a_division()


def dequantizer(seed: int) -> None:
    for granularity in laws.GRANULARITIES:
        for offset in range(40):
            laws.dequantize(numerics, granularity, seed + offset)


def packing(seed: int) -> None:
    for offset in range(60):
        laws.pack(numerics, seed + offset)


def products(seed: int) -> None:
    for epilogue in ("accumulator", "float", "codes"):
        for index in range(70):
            laws.gemm(numerics, problems.gemm_problem(index, seed, epilogue))


def signed_zero(seed: int) -> None:
    from numerics.test_gemm import test_negative_zero_survives_an_absent_bias_and_not_a_present_one as check

    check()


def nan_row(seed: int) -> None:
    from numerics.test_gemm import test_a_nan_scale_gives_a_nan_row_only as check

    check()


def one_row(seed: int) -> None:
    from numerics.test_gemm import test_scalar_and_per_token_scale_of_one_row_differ_as_documented as check

    check()


def layers(seed: int) -> None:
    for offset in range(120):
        laws.linear(numerics, seed + offset)


def float_layers(seed: int) -> None:
    from numerics.test_linear import test_float_layers_stay_within_the_bound as check

    for w_bits in (8, 4, 16):
        for grouped in (False, True):
            check(torch.float16, w_bits, grouped)


def autocast(seed: int) -> None:
    from numerics.test_linear import test_autocast_does_not_narrow_a_float_layer as check

    check()


def producers(seed: int) -> None:
    for name in laws.PRODUCERS:
        for offset in range(6):
            laws.producer(numerics, name, seed + offset)


def sums(seed: int) -> None:
    laws.sums(numerics, seed)


def overflowing_squares(seed: int) -> None:
    from ops.test_fused_quantize import check_overflow

    check_overflow(numerics)


def vocabulary(seed: int) -> None:
    assert qrange(8) == (-127, 127)
    assert qrange(4, False) == (-8, 7)
    assert qrange(8, True, False) == (-128, 127)
    assert scale_shape("per_group", (3, 8), 4) == (3, 2)
    assert scale_shape("per_channel", (3, 8)) == (3,)
    for shape, group in (((3, 8), 3), ((3, 8), 0)):
        try:
            scale_shape("per_group", shape, group)
        except ArgumentError:
            continue
        raise AssertionError(f"group {group} was accepted")


def bounds(seed: int) -> None:
    full = (-128, 127)
    for k, has_zero_point, x_range in ((131_071, False, full), (65_793, True, full), (65_793, False, (0, 255))):
        check_k(k, x_range, full, has_zero_point=has_zero_point)
        try:
            check_k(k + 1, x_range, full, has_zero_point=has_zero_point)
        except ArgumentError:
            continue
        raise AssertionError(f"K = {k + 1} was accepted")


# module, what it says, what the bug makes of it, the bug in words
EDITS = {
    quantizers: [
        ("qparams", "amax / as_float32(qmax, amax)", "amax / as_float32(qmax + 1, amax)", "scale over 128"),
        ("qparams", "amax / as_float32(qmax, amax)", "amax * as_float32(1.0 / qmax, amax)", "scale by a reciprocal"),
        ("qparams", "torch.where(amax < AMAX_FLOOR, as_float32(1.0, amax), scale)", "scale", "no guard for zero rows"),
        (
            "qparams",
            "torch.where(amax < AMAX_FLOOR, as_float32(1.0, amax), scale)",
            "torch.where(amax <= AMAX_FLOOR, as_float32(1.0, amax), scale)",
            "floor itself counts as zero",
        ),
        ("qparams", "AMAX_FLOOR: Final = 2.0**-100", "AMAX_FLOOR: Final = 2.0**-99", "floor one octave up"),
        ("qparams", "AMAX_FLOOR: Final = 2.0**-100", "AMAX_FLOOR: Final = 2.0**-101", "floor one octave down"),
        (
            "qparams",
            "return torch.where(amax < torch.inf, scale, as_float32(torch.nan, amax))",
            "return scale",
            "infinite amax gives an infinite scale",
        ),
        ("qparams", "low = torch.where(low >= 0, zero, low)", "low = low", "range not widened below"),
        ("qparams", "high = torch.where(high <= 0, zero, high)", "high = high", "range not widened above"),
        ("qparams", "as_float32(qmax - qmin, low)", "as_float32(qmax - qmin + 1, low)", "one step too many"),
        (
            "qparams",
            "scale = high / steps - low / steps",
            "scale = (high - low) / steps",
            "range subtracted before it is divided",
        ),
        ("qparams", "scale = torch.where(amax < AMAX_FLOOR, one, scale)\n", "\n", "affine: no guard for zero ranges"),
        ("qparams", "scale = torch.where(amax < torch.inf, scale, nan)", "scale = scale", "affine: infinity passes"),
        (
            "qparams",
            "torch.round(low * scale_recip(scale))",
            "torch.floor(low * scale_recip(scale))",
            "zero point rounded down",
        ),
        ("qparams", "return scale, qmin - codes_below", "return scale, -codes_below", "zero point forgets qmin"),
        ("qparams", "return scale, qmin - codes_below", "return scale, qmin + codes_below", "sign of the zero point"),
        (
            "qparams",
            "torch.where(scale.isnan(), as_float32(qmin, low), torch.maximum(codes_below, -steps))",
            "torch.where(scale.isnan(), as_float32(0.0, low), torch.maximum(codes_below, -steps))",
            "poisoned zero point at qmin",
        ),
        ("qparams", "torch.maximum(codes_below, -steps))", "codes_below)", "zero point not clamped"),
        ("quantize", "v = torch.round(x * recip)", "v = torch.floor(x * recip + 0.5)", "rounds half up"),
        (
            "quantize",
            "v = torch.round(x * recip)",
            "v = torch.copysign(torch.floor((x * recip).abs() + 0.5), x)",
            "rounds half away from zero",
        ),
        ("quantize", "v = torch.round(x * recip)", "v = torch.trunc(x * recip)", "truncates"),
        (
            "quantize",
            "v = torch.round(x * recip)",
            "v = torch.round((x * recip).to(torch.bfloat16).float())",
            "product in 16 bit",
        ),
        ("quantize", "v.clamp(qmin, qmax)).to(torch.int8)", "v).to(torch.int8)", "no clamp: the cast wraps"),
        (
            "quantize",
            "v.clamp(qmin, qmax)).to(torch.int8)",
            "v.clamp(qmin + 1, qmax)).to(torch.int8)",
            "clamps one code early",
        ),
        (
            "quantize",
            "return torch.where(v.isnan(), 0.0, v.clamp(qmin, qmax))",
            "return v.nan_to_num(1.0).clamp(qmin, qmax)",
            "NaN becomes 1",
        ),
        (
            "quantize",
            "(qmin - zero_point).to(torch.float32)",
            "(qmin + zero_point).to(torch.float32)",
            "lower clamp with the wrong sign",
        ),
        (
            "quantize",
            "(qmax - zero_point).to(torch.float32)",
            "torch.full_like(v, qmax)",
            "upper clamp forgets the zero point",
        ),
        ("quantize", "v).to(torch.int32) + zero_point)", "v).to(torch.int32) - zero_point)", "zero point subtracted"),
        (
            "quantize",
            "(torch.where(v.isnan(), 0.0, v).to(torch.int32) + zero_point)",
            "torch.where(v.isnan(), 0, v.to(torch.int32) + zero_point)",
            "NaN becomes code 0, not zero_point",
        ),
        (
            "quantize",
            "scale_from_amax(grouped.abs().amax(-1), qmax)",
            "scale_from_amax(grouped.amax(-1), qmax)",
            "amax without the sign",
        ),
        (
            "quantize",
            "scale_from_amax(grouped.abs().amax(-1), qmax)",
            "scale_from_amax(grouped.abs().nan_to_num(0.0).amax(-1), qmax)",
            "amax ignores NaN",
        ),
        (
            "quantize",
            "scale_from_amax(grouped.abs().amax(-1), qmax)",
            "scale_from_amax(grouped.abs()[..., :-1].amax(-1) if grouped.shape[-1] > 1 else grouped.abs().amax(-1), qmax)",
            "amax misses the last element",
        ),
        (
            "quantize",
            "scale_from_amax(grouped.abs().amax(-1), qmax)",
            "scale_from_amax(grouped.abs().amax().expand(grouped.shape[:-1]), qmax)",
            "one scale for all rows",
        ),
        (
            "quantize",
            "grouped = _grouped(x.to(torch.float32), granularity, group_size)\n",
            "grouped = _grouped(x.to(torch.float16).to(torch.float32), granularity, group_size)\n",
            "range measured in fp16",
        ),
        ("quantize", "None if symmetric else zero_point, granularity", "None, granularity", "zero point not used"),
        (
            "quantize",
            "x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)",
            "x.unflatten(-1, (group_size, x.shape[-1] // group_size)).transpose(-1, -2)",
            "groups interleaved",
        ),
    ],
    reciprocal: [
        (
            "quantize",
            "v = torch.round(x * recip)",
            "v = torch.round(x.double() * recip.double())",
            "product not rounded to float32",
        ),
        ("quantize", "v = torch.round(x * recip)", "v = torch.round(x / (1 / recip))", "divides by the scale"),
    ],
    parameters: [
        ("qparams", "torch.round(low * scale_recip(scale))", "torch.round(low / scale)", "zero point by a division"),
        (
            "qparams",
            "torch.where(amax < AMAX_FLOOR, one, scale)",
            "torch.where(amax <= AMAX_FLOOR, one, scale)",
            "affine: floor itself counts as zero",
        ),
    ],
    large_sums: [
        ("gemm", "if out_dtype == torch.int32:", "if False:", "accumulator through float32"),
        (
            "gemm",
            "block.to(torch.float64).t()).to(torch.int64)",
            "block.to(torch.float64).t()).to(torch.float32).to(torch.int64)",
            "sums rounded to float32",
        ),
    ],
    overflow: [
        (
            "epilogue",
            "return t.to(out_dtype)",
            "return t.clamp(-65504.0, 65504.0).to(out_dtype)",
            "saturates where IEEE overflows",
        ),
    ],
    dequantizer: [
        ("quantize", "steps = steps - _spread(", "steps = steps + _spread(", "zero point added when dequantising"),
        (
            "quantize",
            "real = steps.to(torch.float32) * _spread(scale, granularity, shape)",
            "real = steps.to(out_dtype) * _spread(scale, granularity, shape).to(out_dtype)",
            "dequantises in 16 bit",
        ),
        (
            "quantize",
            "real = steps.to(torch.float32) * _spread(scale, granularity, shape)",
            "real = q.to(torch.float32).reshape(steps.shape) * _spread(scale, granularity, shape) - (steps.new_zeros(()) if "
            "zero_point is None else _spread(zero_point, granularity, shape)) * _spread(scale, granularity, shape)",
            "zero point subtracted in float",
        ),
        (
            "quantize",
            "_grouped(q.to(torch.int32), granularity",
            "_grouped(q.view(torch.int8).to(torch.int32), granularity",
            "uint8 codes read as int8",
        ),
    ],
    packing: [
        (
            "pack",
            "nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)",
            "(nibbles[..., 0::2] << 4) | nibbles[..., 1::2]",
            "nibbles swapped",
        ),
        ("pack", "pad(nibbles, (0, 1))", "pad(nibbles, (0, 1), value=15)", "tail nibble not zero"),
        ("pack", "pad(nibbles, (0, 1))", "pad(nibbles, (1, 0))", "padded in front"),
        ("pack", "(nibbles ^ 8).view(torch.int8) - 8", "nibbles.view(torch.int8)", "no sign extension"),
        ("pack", "(nibbles ^ 8).view(torch.int8) - 8", "nibbles.view(torch.int8) - 8", "offset binary"),
        ("pack", "(packed & 0xF, packed >> 4)", "(packed >> 4, packed & 0xF)", "unpacks the high nibble first"),
        ("pack", "view(torch.uint8) & 0xF", "view(torch.uint8) & 0x7", "three bits kept"),
        ("pack", ".flatten(-2)[..., :k]", ".flatten(-2)[..., -k:] if k else packed", "tail taken from the front"),
    ],
    products: [
        ("gemm", "acc = acc - _rows(x_zero_point, x)", "acc = acc + _rows(x_zero_point, x)", "zero-point term added"),
        (
            "gemm",
            "w.sum(-1, dtype=torch.int64)",
            "w.sum(-1).to(torch.int8).to(torch.int64)",
            "weight sum wraps at 8 bit",
        ),
        (
            "gemm",
            "w.sum(-1, dtype=torch.int64)",
            "w[..., : w.shape[-1] & ~1].sum(-1, dtype=torch.int64)",
            "weight sum misses an odd tail",
        ),
        (
            "gemm",
            "block.to(torch.float64).t()).to(torch.int64)",
            "block.to(torch.float64).t()).clamp(-32768, 32767).to(torch.int64)",
            "accumulator saturates at int16",
        ),
        (
            "gemm",
            "rows = x.reshape(-1, x.shape[-1]).to(torch.float64)",
            "rows = x.reshape(-1, x.shape[-1]).to(torch.int8).to(torch.float64)",
            "uint8 codes wrap to int8",
        ),
        (
            "gemm",
            "rows = x.reshape(-1, x.shape[-1]).to(torch.float64)",
            "rows = x.reshape(-1, x.shape[-1]).to(torch.float64); rows[:, x.shape[-1] // 16 * 16 :] = 0",
            "K tail dropped",
        ),
        ("gemm", "torch.cat(blocks, dim=1)", "torch.cat(blocks, dim=1).to(torch.float16)", "accumulator in 16 bit"),
        (
            "gemm",
            "accumulate(x_g, w_g, x_zero_point).to(torch.float32) * w_scale[:, g]",
            "accumulate(x_g, w_g, x_zero_point).to(torch.float32) * w_scale[:, 0]",
            "first group scale for all",
        ),
        (
            "gemm",
            "accumulate(x_g, w_g, x_zero_point).to(torch.float32) * w_scale[:, g]",
            "accumulate(x_g, w_g, None).to(torch.float32) * w_scale[:, g]",
            "no zero point in groups",
        ),
        (
            "gemm",
            "zip(torch.split(x, group_size, -1), torch.split(w, group_size, -1), strict=True)",
            "reversed(list(zip(torch.split(x, group_size, -1), torch.split(w, group_size, -1), strict=True)))",
            "groups paired with the wrong scale",
        ),
        (
            "gemm",
            "        return t if x_scale is None else t * _rows(x_scale, x)\n    t = accumulate",
            "        return t\n    t = accumulate",
            "input scale forgotten with groups",
        ),
        (
            "gemm",
            "t = t if w_scale is None else t * w_scale\n        return t if x_scale is None else t * _rows(x_scale, x)",
            "t = t if x_scale is None else t * _rows(x_scale, x)\n        return t if w_scale is None else t * w_scale",
            "scales of a token in the other order",
        ),
        (
            "gemm",
            "x_scale.reshape(()) * w_scale)",
            "x_scale.reshape(())) * (1.0 if w_scale is None else w_scale)",
            "scalar scale applied in two roundings",
        ),
        (
            "gemm",
            "else x_scale.reshape(()) * w_scale)",
            "else x_scale.reshape(()).double() * w_scale.double())",
            "product of scales in float64",
        ),
        ("epilogue", "t = t + bias", "t = t - bias", "bias subtracted"),
        (
            "epilogue",
            "        t = t + bias\n    t = activate(t, activation, clamp_min, clamp_max)\n",
            "        t = activate(t, activation, clamp_min, clamp_max) + bias\n",
            "bias after the activation",
        ),
        (
            "epilogue",
            "    t = activate(t, activation, clamp_min, clamp_max)\n    if residual is not None:\n"
            "        t = t + residual.to(torch.float32)\n    return t",
            "    if residual is not None:\n        t = t + residual.to(torch.float32)\n"
            "    return activate(t, activation, clamp_min, clamp_max)",
            "residual before the activation",
        ),
        ("epilogue", "residual.to(torch.float32)", "residual.to(torch.bfloat16)", "residual narrowed"),
        ("activation", "t = torch.where(t < low, low, t)", "t = t", "clamp without its lower limit"),
        (
            "activation",
            "return torch.where(t > high, high, t)",
            "return torch.where(t > high, low, t)",
            "clamp to the wrong end",
        ),
        ("activation", '_gelu(gelu_tanh, "tanh")', '_gelu(gelu_erf, "tanh")', "gelu forms confused"),
        ("activation", "Activation(silu, F.silu", "Activation(F.silu, F.silu", "torch's silu instead of ours"),
        (
            "epilogue",
            "return t.to(out_dtype)",
            "return torch.nextafter(t, torch.zeros_like(t)).to(out_dtype)",
            "one ulp lost before the store",
        ),
        ("epilogue", "return t.to(out_dtype)", "return t.to(torch.bfloat16).to(out_dtype)", "stored through bfloat16"),
        (
            "epilogue",
            "None if out_zero_point is None else out_zero_point.reshape(())",
            "None",
            "output zero point dropped",
        ),
        ("epilogue", "out_qmin, out_qmax)", "-128, 127)", "output codes in the full range"),
        (
            "epilogue",
            "recip = scale_recip(out_scale.reshape(()))",
            "recip = out_scale.reshape(())",
            "requantises with the scale itself",
        ),
    ],
    signed_zero: [
        (
            "epilogue",
            "    if bias is not None:\n        t = t + bias\n",
            "    t = t + (0.0 if bias is None else bias)\n",
            "absent bias added as zero",
        ),
        (
            "activation",
            "torch.where(t < 0, as_float32(0.0, t), t)",
            "t.clamp(min=0.0) + 0.0",
            "relu loses the sign of zero",
        ),
    ],
    nan_row: [
        (
            "activation",
            "torch.where(t < 0, as_float32(0.0, t), t)",
            "torch.where(t > 0, t, as_float32(0.0, t))",
            "relu turns NaN into zero",
        ),
        (
            "activation",
            "return torch.where(t > high, high, t)",
            "return torch.where(t < high, t, high)",
            "clamp turns NaN into its limit",
        ),
    ],
    one_row: [
        (
            "gemm",
            "x_scale.dim() > 0 and x_scale.shape == x.shape[:-1]",
            "x_scale.numel() > 1",
            "one row takes its scale for a scalar",
        ),
        (
            "gemm",
            "x_scale.dim() > 0 and x_scale.shape == x.shape[:-1]",
            "x_scale.numel() == x[..., :1].numel()",
            "one row takes a scalar for its scale",
        ),
    ],
    layers: [
        (
            "linear",
            "    x_q = x\n",
            "    x_q = x.view(torch.int8) if x.element_size() == 1 else x\n",
            "uint8 codes read as int8 ones",
        ),
        (
            "linear",
            'quantize_dynamic(x, "per_token", 0, x_symmetric',
            'quantize_dynamic(x, "per_token", 0, True',
            "affine inputs quantised as symmetric",
        ),
        ("linear", "None if x_symmetric else x_zero_point, True", "None, True", "dynamic zero point not corrected"),
        ("linear", "x.dim() == 1:  # one row", "x.dim() == 0:  # one row", "a vector is scaled as a tensor"),
        (
            "linear",
            "x_scale = x_scale.reshape(())\n",
            "x_scale = x_scale.reshape(-1)\n",
            "static scale of one row taken per token",
        ),
        (
            "linear",
            'x_zero_point, "per_tensor", 0, x_qmin, x_qmax)',
            'None, "per_tensor", 0, x_qmin, x_qmax)',
            "static zero point not used",
        ),
        (
            "linear",
            "x.dtype if x.dtype.is_floating_point else torch.float32\n    x_q",
            "torch.float32\n    x_q",
            "result type not that of the input",
        ),
        ("linear", "torch.int8 if out_scale is not None else out_dtype", "out_dtype", "codes stored as floats"),
        (
            "linear",
            "    if x_per_token:\n",
            "    if x_per_token and x.is_floating_point():\n",
            "scales of rows taken for one",
        ),
    ],
    float_layers: [
        (
            "linear",
            "unpack(w, x.shape[-1], code_type(w_bits))",
            "unpack(w.flip(-1) if w_bits == 4 else w, x.shape[-1], code_type(w_bits))",
            "int4 weights read backwards",
        ),
        (
            "linear",
            "dequantize(codes, w_scale, w_zero_point, granularity",
            "dequantize(codes, w_scale, None, granularity",
            "weight zero point ignored",
        ),
        (
            "linear",
            "linear(x.to(torch.float32), w.to(torch.float32))",
            "linear(x.bfloat16(), w.bfloat16()).float()",
            "float layers accumulate in bfloat16",
        ),
    ],
    sums: [
        (
            "norm",
            "F.pad(x, (0, rounds * SUM_LANES - k))",
            "F.pad(x, (rounds * SUM_LANES - k, 0))",
            "lanes counted from the end",
        ),
        ("norm", "lanes = lanes + rows[..., i, :]", "lanes = lanes + rows[..., -1 - i, :]", "lanes added from the end"),
    ],
    overflowing_squares: [
        (
            "norm",
            "torch.where(shifted < torch.inf, factor, as_float32(torch.nan, shifted))",
            "factor",
            "a row whose squares overflow is made of zeros",
        ),
    ],
    producers: [
        (
            "norm",
            "total = add(x, residual).contiguous()\n    return (*layer_norm_quantize(total, *args",
            "total = add(x, residual).contiguous()\n    return (*layer_norm_quantize(residual, *args",
            "norm of the residual",
        ),
        (
            "norm",
            "return silu(gate.contiguous()) * up",
            "return (silu(gate.contiguous()) * up).to(x.dtype).float()",
            "rounded to 16 bits before the codes",
        ),
        (
            "norm",
            "return t if bias is None else",
            "return t if bias is None or weight is None else",
            "bias forgotten where there is no weight",
        ),
    ],
    autocast: [
        ("linear", "with torch.autocast(x.device.type, enabled=False):", "if True:", "autocast narrows a float layer"),
    ],
}

CORE_EDITS = {
    vocabulary: [
        ("dtypes", "if symmetric and narrow_range", "if symmetric", "full range not offered"),
        ("dtypes", "if symmetric and narrow_range", "if narrow_range", "affine codes narrowed"),
        ("granularity", "shape[-1] // group_size)", "group_size)", "group scales of the wrong shape"),
        ("granularity", " or shape[-1] % group_size != 0", "", "ragged groups accepted"),
    ],
    bounds: [
        ("bounds", "INT32_MAX // product", "(INT32_MAX + 1) // product", "bound one too large"),
        (
            "bounds",
            "k_max(x_qmax - x_qmin, w_abs_max)",
            "k_max(max(-x_qmin, x_qmax), w_abs_max)",
            "zero-point term not bounded",
        ),
        (
            "bounds",
            "bound = k_max(max(-x_range[0], x_range[1], 0), w_abs)",
            "bound = k_max(128, w_abs)",
            "uint8 codes bounded as int8",
        ),
        ("bounds", "if not 0 <= k <= bound:", "if k > bound + 1:", "K one beyond the bound accepted"),
    ],
}

# What no check can see, and why. Listed here so that the number stays honest.
SURVIVORS = {
    "zero point not clamped": "the range contains 0, so rint(low * recip) lies in [-steps, 0] up to rounding, and the "
    "rounding of scale (three roundings of 2^-24) is too small to move it by half a code",
}

for _package, _table in (("numerics", EDITS), ("core", CORE_EDITS)):
    for _check, _edits in _table.items():
        for _module, _old, _new, _name in _edits:
            register(
                edit(f"{_package}.{_module}", _old, _new),
                _check,
                name=_name,
                area=f"{_package}.{_module}",
                survives=SURVIVORS.get(_name),
            )
