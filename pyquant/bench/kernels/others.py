"""Kernels of other packages, each when it is installed: gemlite, humming-kernels, torchao, bitsandbytes.

They are called as their own documentation says. What they return is checked like everybody's, so that an interface that
changed shows as a candidate that did not run, with the reason, and never as a figure.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pyquant.bench.kernels.adapter import Adapter, Built, bound, module_call, needs_multiple, package
from pyquant.bench.kernels.torch_own import GROUP, W4_GROUPED, group_codes
from pyquant.bench.problem import Inputs, Weights

HUMMING_W4A16 = "humming W4A16 g128"
HUMMING_W4A8 = "humming W4A8-int8 (codes in)"
HUMMING_W8A8 = "humming W8A8-int8 (codes in)"
BNB_4BIT = "bitsandbytes 4-bit nf4"


def _gemlite_w8a8(weights: Weights) -> Built:
    helper = package("gemlite.helper", "gemlite")
    maker = helper.A8W8_int8_dynamic if hasattr(helper, "A8W8_int8_dynamic") else helper.A8W8_INT8_dynamic
    layer = weights.linear(torch.bfloat16)
    return module_call(maker(device=str(weights.device), dtype=torch.bfloat16).from_linear(layer, del_orig=False))


def _gemlite_w4a16(weights: Weights) -> Built:
    helper = package("gemlite.helper", "gemlite")
    needs_multiple("K", weights.k, GROUP)
    codes, scale = group_codes(weights, GROUP)
    scale = scale.reshape(-1, 1).to(torch.bfloat16)
    maker = helper.A16W4_HQQ_INT(device=str(weights.device), dtype=torch.bfloat16)
    unsigned, zeros = (codes + 8).to(torch.uint8), torch.full_like(scale, 8.0)
    return module_call(maker.from_weights(unsigned, scale, zeros, weights.bias.to(torch.bfloat16)))


def _humming(w_type: str, group_size: int, x_type: str, weights: Weights) -> Built:
    humming = package("humming.layer", "humming-kernels")
    needs_multiple("K", weights.k, max(group_size, 32))
    layer = humming.HummingLayer(
        shape_n=weights.n,
        shape_k=weights.k,
        torch_dtype=torch.bfloat16,
        weight_config={"dtype": w_type, "group_size": group_size, "scale_dtype": "bfloat16"},
        input_config={"dtype": x_type},
    ).to(weights.device)
    layer.load_from_unquantized(weights.w.to(torch.bfloat16))
    layer.transform()

    def arguments(inputs: Inputs) -> dict[str, Any]:
        if x_type == "bfloat16":
            return {"inputs": inputs.bf16}
        x_q, x_scale = humming.HummingLayerMethod.may_quant_input(layer, inputs.bf16)
        return {"inputs": x_q, "input_scale": x_scale}

    return Built(layer, bound(arguments, lambda state, x: state(**x)))


def _torchao(config: str, weights: Weights, **options: Any) -> Built:
    quantization = package("torchao.quantization", "torchao")
    module = torch.nn.Sequential(weights.linear(torch.bfloat16))
    quantization.quantize_(module, getattr(quantization, config)(**options))
    return module_call(module[0])


def _bitsandbytes_8bit(weights: Weights) -> Built:
    bnb = package("bitsandbytes", "bitsandbytes")
    layer = bnb.nn.Linear8bitLt(weights.k, weights.n, has_fp16_weights=False, threshold=0.0)
    return _loaded(layer, weights)


def _bitsandbytes_4bit(weights: Weights) -> Built:
    bnb = package("bitsandbytes", "bitsandbytes")
    layer = bnb.nn.Linear4bit(weights.k, weights.n, compute_dtype=torch.bfloat16, quant_type="nf4")
    return _loaded(layer, weights)


def _loaded(layer: torch.nn.Module, weights: Weights) -> Built:
    """bitsandbytes quantises when a loaded layer moves to the device."""
    layer.load_state_dict(weights.linear(torch.bfloat16).cpu().state_dict())
    return module_call(layer.to(weights.device).eval())


OTHERS = (
    Adapter("gemlite W8A8 int8 dynamic", _gemlite_w8a8, 8, 16, "int8", min_sqnr=30),
    Adapter("gemlite W4A16 g128", _gemlite_w4a16, W4_GROUPED, 16, "bf16"),
    Adapter(HUMMING_W8A8, partial(_humming, "uint8", 0, "int8"), 8, 8, "int8", has_bias=False, min_sqnr=30),
    Adapter(HUMMING_W4A8, partial(_humming, "uint4", 0, "int8"), 4, 8, "int8", has_bias=False, min_sqnr=12),
    Adapter(HUMMING_W4A16, partial(_humming, "uint4", GROUP, "bfloat16"), W4_GROUPED, 16, "bf16", has_bias=False),
    Adapter(
        "torchao int8 dynamic", partial(_torchao, "Int8DynamicActivationInt8WeightConfig"), 8, 16, "int8", min_sqnr=30
    ),
    Adapter(
        "torchao int4 weights g128", partial(_torchao, "Int4WeightOnlyConfig", group_size=GROUP), W4_GROUPED, 16, "bf16"
    ),
    Adapter("bitsandbytes 8-bit", _bitsandbytes_8bit, 8, 16, "int8", min_sqnr=28),
    Adapter(BNB_4BIT, _bitsandbytes_4bit, 4 + 32 / 64, 16, "bf16"),
)
