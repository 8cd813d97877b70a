"""Layers out of a checkpoint's records, without the model that they belong to."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from pyquant.core.scheme import QScheme
from pyquant.io.record import LayerRecord
from pyquant.nn.patches import Patches
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear


def layer_of(record: LayerRecord) -> QLinear | QConv2d:
    """The layer that a record of kind 'linear' or 'conv2d' describes, on the CPU."""
    make: Any = QLinear.from_codes
    if record.geometry is not None:
        make = partial(QConv2d.from_codes, patches=Patches(**record.geometry))
    layer: QLinear | QConv2d = make(
        record.codes, record.weight_scale, scheme=QScheme.from_dict(record.scheme),
        bias=None if record.bias is None else record.bias.float(),
        weight_zero_point=record.weight_zero_point, input_scale=record.input_scale,
        input_zero_point=record.input_zero_point, output_scale=record.output_scale,
        output_zero_point=record.output_zero_point, activation=record.activation, clamp=record.clamp,
    )  # fmt: skip
    return layer


@lru_cache(maxsize=64)
def kernel_name(scheme: QScheme, device: str = "cpu") -> str:
    """The kernel that a layer of this scheme uses on a device, asked of a small layer of that scheme."""
    k, n = scheme.weights.group_size or 32, 8
    shape = {"per_channel": (n,), "per_group": (n, 1), "per_tensor": (1,)}[scheme.weights.granularity]
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
