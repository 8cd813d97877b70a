"""Quantised layers for tests: every preset, with what a static one needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pyquant.core.presets import (
    FP16,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A16,
    W4A4Dynamic,
    W4A8Dynamic,
    W4A8TwoLevel,
    W4A8TwoLevelDynamic,
    W8A8Dynamic,
)
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.nn.qlinear import QLinear

INTEGER = [
    W8A8(),
    W8A8(symmetric_inputs=False),
    W8A8Dynamic(),
    W8A8Dynamic(symmetric_inputs=False),
    W4A8(None),
    W4A8(16),
    W4A8Dynamic(None),
    W4A8Dynamic(16),
    W4A8Dynamic(16, symmetric_inputs=False),
    W4A8TwoLevel(16),
    W4A8TwoLevelDynamic(16, symmetric_inputs=False),
    W4A4(None),
    W4A4Dynamic(None),
    W4A4Dynamic(16),
]
FLOAT = [W8A16(), W8A16(16, symmetric=False), W4A16(16), W4A16(None, symmetric=False), FP16(), FP16("bfloat16")]
ALL = INTEGER + FLOAT
CODES_OUT = [
    QScheme(s.weights, s.inputs, TensorScheme(bits=bits, symmetric=symmetric))
    for s in (W8A8(), W4A8Dynamic(16), W4A4())
    for bits, symmetric in ((8, True), (8, False), (4, True))
]


def calibration(scheme: QScheme) -> dict[str, Any]:
    """The static numbers that from_float wants with a scheme."""
    numbers: dict[str, Any] = {}
    for name, tensor in (("input", scheme.inputs), ("output", scheme.outputs)):
        if tensor is not None and not tensor.dynamic:
            numbers[f"{name}_scale"] = (3.0 if name == "input" else 2.0) / tensor.code_range[1]
            if not tensor.symmetric:
                numbers[f"{name}_zero_point"] = 3
    return numbers


def layer(
    scheme: QScheme, k: int = 32, n: int = 24, bias: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> QLinear:
    """A calibrated QLinear from a random float layer."""
    torch.manual_seed(k * 1000 + n)
    linear = nn.Linear(k, n, bias=bias).to(dtype)
    return QLinear.from_float(linear, scheme, **calibration(scheme), **options)
