"""One legal call of every op of torch.ops.pyquant."""

from __future__ import annotations

import math
from typing import Any

import problems
import torch

from pyquant import numerics, ops
from pyquant.core.patches import Patches

CPU_LAYOUT = ops.layout_for(torch.device("cpu"))


def spec(n: int, k: int, **kwargs: Any) -> list[int]:
    return list(ops.LinearSpec(n, k, layout=CPU_LAYOUT, **kwargs).to_ints())


def samples(m: int, n: int, k: int) -> dict[str, tuple[Any, ...]]:
    """One legal call of every op, positional."""
    draw, groups = problems.Draw(problems.BASE_SEED, "samples", m, n, k), math.gcd(n, 4)
    x, x_q = draw.normal(m, k), problems.codes(draw, "s8", "uniform", m, k)
    w = problems.codes(draw, "s8", "uniform", n, k)
    w4 = problems.codes(draw, "s4", "uniform", n, k)
    packed4, w_scale, bias = numerics.pack_int4(w4), problems.scales(draw, n), draw.normal(n)
    residual = draw.normal(m, n)
    s = spec(n, k, has_bias=True)
    epilogue = (w_scale, problems.scales(draw, m), None, bias, residual, None, None, 0, "gelu")
    packed = torch.ops.pyquant.pack_linear(w, w_scale, bias, None, None, None, None, s)
    fake_mask = draw.codes(0, 255, (m * k + 7) // 8).to(torch.uint8)
    return {
        "quantize": (x, problems.scales(draw, m), None, "per_token"),
        "quantize_dynamic": (x, "per_token", 0, False, -128, 127),
        "fake_quantize": (x, problems.scales(draw, m), None, "per_token"),
        "fake_quantize_out": (
            x,
            problems.scales(draw, m),
            None,
            "per_token",
            0,
            -7,
            7,
            torch.empty(m, k),
            torch.empty((m * k + 7) // 8, dtype=torch.uint8),
        ),
        "fake_quantize_dynamic": (x, "per_token", 0, False, -128, 127),
        "fake_quantize_dynamic_out": (
            x,
            "per_token",
            0,
            False,
            -128,
            127,
            torch.empty(m, k),
            torch.empty(m),
            torch.empty(m, dtype=torch.int32),
        ),
        "fake_quantize_backward": (x, fake_mask),
        "fake_quantize_backward_": (draw.normal(m, k), fake_mask),
        "fake_quantize_lsq_backward": (draw.normal(m, k), x, problems.scales(draw, m), None, "per_channel", 0, -7, 7),
        "dequantize": (x_q, problems.scales(draw, m), None, "per_token", 0, torch.bfloat16),
        "magnitude_histogram": (x, 2),
        "pack_int4": (w4,),
        "unpack_int4": (packed4, k),
        "gemm_s8s8": (x_q, w, *epilogue),
        "gemm_s8s4": (x_q, packed4, *epilogue),
        "gemm_s4s4": (problems.codes(draw, "s4", "uniform", m, k), packed4, *epilogue),
        "gemm": (problems.codes(draw, "s4", "uniform", m, k), packed4, *epilogue),
        "pack_linear": (w, w_scale, bias, None, None, None, None, s),
        "unpack_linear": (packed, s),
        "qlinear": (x, packed, residual, s, torch.float16),
        "qconv2d": (
            draw.normal(m, k * groups, 4, 5),
            torch.ops.pyquant.pack_linear(
                problems.codes(draw, "s8", "uniform", n, 2 * k),
                w_scale,
                bias,
                *(None,) * 4,
                spec(n, 2 * k, has_bias=True),
            ),
            draw.normal(m, n, 2, 6),
            spec(n, 2 * k, has_bias=True),
            list(Patches((1, 2), (2, 1), (0, 0, 1, 1), groups=groups).to_ints()),
            torch.bfloat16,
        ),
        "weight_only_linear": (x, packed4, w_scale, None, bias, residual, 4, 0, "silu"),
        "float_linear": (x, draw.normal(n, k), bias, residual, "relu"),
        "rms_norm_quantize": (x, draw.normal(k), 1e-6, False, -128, 127),
        "layer_norm_quantize": (x, draw.normal(k), draw.normal(k), 1e-5),
        "add_rms_norm_quantize": (x, draw.normal(m, k), draw.normal(k), 1e-6, True, -7, 7),
        "add_layer_norm_quantize": (x, draw.normal(m, k), draw.normal(k), draw.normal(k)),
        "silu_mul_quantize": (draw.normal(m, 2 * k), False, -128, 127),
        "activation_mul_quantize": (x, draw.normal(m, k), "clamp", -0.5, 2.0, False, -128, 127),
        "hadamard_quantize": (x, k & -k, False, -128, 127, 0.75),
        "hadamard_transform": (x, k & -k, 0.75),
    }


# The arguments that an op writes: contiguous, and the answer instead of a result.
WRITTEN = {"fake_quantize_out": (7, 8), "fake_quantize_dynamic_out": (6, 7, 8), "fake_quantize_backward_": (0,)}
