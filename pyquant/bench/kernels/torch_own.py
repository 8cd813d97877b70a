"""The framework's own kernels: 16-bit products, int8 with a compiled epilogue, fp8 by rows, 4-bit weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pyquant.bench.kernels.adapter import Adapter, Built, bf16, bound, needs_multiple
from pyquant.bench.problem import Weights, to_fp8

MM_BF16 = "torch.mm bf16"
MM_FP16 = "torch.mm fp16"
LINEAR_BF16 = "nn.Linear bf16"
INT_MM = "torch._int_mm + compiled epilogue"
SCALED_MM = "torch._scaled_mm fp8 rows"
INT4PACK = "torch._weight_int4pack_mm g128"
GROUP = 128


def _mm(dtype: torch.dtype) -> Callable[[Weights], Built]:
    bind = bound(lambda inputs: inputs.x.to(dtype), lambda w, x: torch.mm(x, w.t()))
    return lambda weights: Built(weights.w.to(dtype), bind)


def _linear(weights: Weights) -> Built:
    state = (weights.w.to(torch.bfloat16), weights.bias.to(torch.bfloat16))
    return Built(state, bound(bf16, lambda state, x: F.linear(x, *state)))


@cache
def _compiled_epilogue() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def epilogue(acc: Tensor, w_scale: Tensor, x_scale: Tensor, bias: Tensor) -> Tensor:
        return (acc.to(torch.float32) * w_scale * x_scale + bias).to(torch.bfloat16)

    compiled: Callable[..., Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = torch.compile
    return compiled(epilogue, dynamic=True)


def _int_mm(weights: Weights) -> Built:
    (codes, scale), epilogue = weights.codes, _compiled_epilogue()
    bind = bound(
        lambda inputs: (inputs.codes[0], inputs.codes[1][:, None]),
        lambda state, x: epilogue(torch._int_mm(x[0], state[0].t()), state[1], x[1], state[2]),
    )
    return Built((codes.clone(), scale, weights.bias), bind)


def _scaled_mm(weights: Weights) -> Built:
    def product(state: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor]) -> Tensor:
        return torch._scaled_mm(x[0], state[0].t(), scale_a=x[1], scale_b=state[1].t(), out_dtype=torch.bfloat16)

    return Built(to_fp8(weights.w), bound(lambda inputs: inputs.fp8, product))


def _int4pack(weights: Weights) -> Built:
    needs_multiple("K", weights.k, GROUP)
    codes, scale = group_codes(weights, GROUP)
    unsigned = (codes + 8).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack((unsigned[:, ::2] << 4 | unsigned[:, 1::2]).contiguous(), 8)
    scale_zero = torch.stack([scale.t(), torch.zeros_like(scale.t())], dim=2).to(torch.bfloat16).contiguous()
    bind = bound(bf16, lambda state, x: torch._weight_int4pack_mm(x, state[0], GROUP, state[1]))
    return Built((packed, scale_zero), bind)


def group_codes(weights: Weights, group: int) -> tuple[Tensor, Tensor]:
    """int8 codes in [-8, 7], [n, k], and float32 scales [n, k / group], symmetric."""
    grouped = weights.w.view(weights.n, -1, group)
    scale = grouped.abs().amax(2).clamp_min(1e-8) / 7
    codes = (grouped / scale[..., None]).round_().clamp_(-8, 7).to(torch.int8)
    return codes.view(weights.n, weights.k), scale


W4_GROUPED = 4 + 16 / GROUP  # bits a weight with its 16-bit scale

TORCH_OWN = (
    Adapter(MM_BF16, _mm(torch.bfloat16), 16, 16, "bf16", has_bias=False, min_sqnr=35),
    Adapter(MM_FP16, _mm(torch.float16), 16, 16, "fp16", has_bias=False, min_sqnr=35),
    Adapter(LINEAR_BF16, _linear, 16, 16, "bf16", min_sqnr=35),
    Adapter(INT_MM, _int_mm, 8, 8, "int8", min_sqnr=30),
    Adapter(SCALED_MM, _scaled_mm, 8, 8, "fp8", has_bias=False, min_sqnr=22),
    Adapter(INT4PACK, _int4pack, W4_GROUPED + 16 / GROUP, 16, "bf16", has_bias=False),
)
