"""Which kernel a saved scheme uses, determined without the model that it belongs to."""

from __future__ import annotations

from functools import lru_cache

import torch

from pyquant.core.scheme import QScheme
from pyquant.nn.qlinear import QLinear


@lru_cache(maxsize=64)
def kernel_name(scheme: QScheme, device: str = "cpu") -> str:
    """The kernel that a layer of this scheme uses on a device, read from a small layer of that scheme."""
    k, n = scheme.weights.group_size or 32, 8
    shape = (n, 1) if scheme.weights.granularity == "per_group" else (n,)  # a scale of the tensor is held for each row
    quantised = not scheme.is_float
    codes = torch.zeros(
        n, k, dtype=torch.int8 if quantised else getattr(torch, scheme.float_dtype or ""), device=device
    )
    layer = QLinear.from_codes(
        codes, torch.ones(shape, device=device) if quantised else None, scheme=scheme,
        weight_zero_point=None if scheme.weights.symmetric else torch.zeros(shape, dtype=torch.int32, device=device),
        input_scale=1.0 if scheme.is_static else None,
        input_zero_point=0 if scheme.is_static and scheme.inputs and not scheme.inputs.symmetric else None,
        output_scale=1.0 if scheme.outputs else None,
        output_zero_point=0 if scheme.outputs and not scheme.outputs.symmetric else None,
    )  # fmt: skip
    return layer.kernel_info(1).kernel
