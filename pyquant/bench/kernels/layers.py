"""pyquant's layers as a user calls them: every scheme from bf16 to bf16, GEMMs on ready codes, and a chain of two.

"codes in" takes int8 codes of a static scale, so that nothing but the product with its epilogue runs: what peers that
take quantised inputs do too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.bench.kernels.adapter import Adapter, Built, bf16, bound, rows_of
from pyquant.bench.problem import STATIC_AMAX, Inputs, Weights
from pyquant.core.presets import scheme_from_name
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.nn.qlinear import QLinear
from pyquant.numerics.quantize import quantize

SCHEMES = (
    "W8A8",
    "W8A8Dynamic",
    "W4A8(group_size=None)",
    "W4A8Dynamic(group_size=None)",
    "W4A8Dynamic(group_size=128)",
    "W8A16",
    "W4A16(group_size=128)",
    "FP16(dtype=bfloat16)",
)
CODES_IN = ("W8A8", "W4A8(group_size=None)", "W4A8(group_size=128)")
CHAIN_CODES, CHAIN_APART = "chain of two W8A8, codes between", "chain of two W8A8, quantised between"
_OUT_AMAX = 6.0  # of y = xw + b with unit variances: sqrt(2) times STATIC_AMAX


def layer_name(scheme: str) -> str:
    """The candidate that runs a scheme from bf16 to bf16."""
    return f"QLinear {scheme}"


def codes_name(scheme: str) -> str:
    """The candidate that takes codes."""
    return f"QLinear {scheme} (codes in)"


def _make(linear: nn.Linear, scheme: QScheme, *, gives_codes: bool = False) -> QLinear:
    calibrated = scheme.is_static and scheme.inputs is not None
    scale = STATIC_AMAX / scheme.inputs.code_range[1] if calibrated and scheme.inputs else None
    if gives_codes:
        scheme = QScheme(scheme.weights, scheme.inputs, TensorScheme(bits=8))
    out_scale = _OUT_AMAX / 127 if gives_codes else None
    return QLinear.from_float(linear, scheme, input_scale=scale, output_scale=out_scale).to(dtype=torch.bfloat16)


def _built(state: Any, first: QLinear, take: Callable[[Inputs], Tensor], call: Callable[..., Tensor]) -> Built:
    """call(state, x, run): what is computed, where run(layer, x) is a layer's own call, or its specification."""

    def reference(inputs: Inputs, rows: Tensor) -> Tensor:
        return call(state, rows_of(take(inputs), rows), QLinear.reference)

    bind = bound(take, lambda state, x: call(state, x, QLinear.__call__))
    exact = first.scheme.is_integer
    return Built(state, bind, reference if exact else None, lambda m: first.kernel_info(m).kernel)


def _static_codes(inputs: Inputs) -> Tensor:
    return quantize(inputs.x, torch.tensor(STATIC_AMAX / 127, device=inputs.weights.device))


def _linked(layer: QLinear, codes: Tensor) -> QTensor:
    """Codes that share the layer's own scale, so that the layer need not read it."""
    return QTensor(codes, layer.input_scale_, layer.input_zero_point_)  # type: ignore[arg-type]


def _layer(text: str, take: Callable[[Inputs], Tensor], weights: Weights) -> Built:
    layer = _make(weights.linear(), scheme_from_name(text))
    return _built(layer, layer, take, lambda layer, x, run: run(layer, x if take is bf16 else _linked(layer, x)))


def _through(layers: Any, x: Tensor, run: Callable[..., Any]) -> Tensor:
    y = run(layers[0], _linked(layers[0], x))
    z: Tensor = run(layers[1], _linked(layers[1], y.data) if isinstance(y, QTensor) else y)
    return z


def _chain(gives_codes: bool, weights: Weights) -> Built:
    """x [m, k] -> [m, n] -> [m, k]: two GEMMs on codes, with codes or with bf16 between them."""
    back = Weights(weights.n, weights.k, weights.device, weights.seed + 1)
    scheme = scheme_from_name("W8A8")
    first = _make(weights.linear(), scheme, gives_codes=gives_codes)
    second = QLinear.from_float(back.linear(), scheme, input_scale=_OUT_AMAX / 127).to(dtype=torch.bfloat16)
    return _built(nn.ModuleList([first, second]), first, _static_codes, _through)


def _adapter(text: str, *, codes_in: bool = False) -> Adapter:
    scheme = scheme_from_name(text)
    bits = scheme.weights.bits + (32 / scheme.weights.group_size if scheme.weights.group_size else 0)
    least = 35.0 if scheme.is_float else (15.0 if scheme.weights.group_size else 12.0) if bits < 8 else 30.0
    peak = "int8" if scheme.is_integer else "bf16"
    name, take, x_bits = (codes_name, _static_codes, 8) if codes_in else (layer_name, bf16, 16)
    return Adapter(name(text), partial(_layer, text, take), bits, x_bits, peak, ours=True, min_sqnr=least)


LAYERS = (
    *(_adapter(text) for text in SCHEMES),
    *(_adapter(text, codes_in=True) for text in CODES_IN),
    # min_sqnr does not apply to a chain (its product is another one): the bits decide
    Adapter(CHAIN_CODES, partial(_chain, True), 8, 8, "int8", ours=True, min_sqnr=float("-inf"), products=2),
    Adapter(CHAIN_APART, partial(_chain, False), 8, 8, "int8", ours=True, min_sqnr=float("-inf"), products=2),
)
