"""The kernel classes that vLLM chooses among: 8-bit weights with 8-bit inputs, and packed 4- and 8-bit weights.

Both leave to vLLM what parameters a layer has and how shards are loaded into them. After loading they put a Product
into the layer and let the parameters go.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.model_executor.kernels.linear import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from pyquant.integrations.vllm.layer import finish, loaded, product_of, said_inputs
from pyquant.integrations.vllm.product import Inputs, Weights, input_scheme, unpacked

CAPABILITY: Final = 80  # of the GPU, as vLLM counts: mma.sync of int8 with asynchronous copies
# vLLM's type of a weight -> bits, and whether it has zero points
_TYPES: Final[dict[Any, tuple[int, bool]]] = {
    scalar_types.uint4b8: (4, False),
    scalar_types.uint4: (4, True),
    scalar_types.int4: (4, False),
    scalar_types.uint8b128: (8, False),
    scalar_types.uint8: (8, True),
}
Answer = tuple[bool, str | None]


class PyquantInt8LinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """W8A8: symmetric weights by channel or tensor; inputs static or dynamic by token, symmetric or affine."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return _runs_here(compute_capability)

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> Answer:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        w, scale, input_scale, input_zero_point, _ = self._get_layer_params(layer)
        loaded(layer, self.layer_param_names[0])
        inputs = input_scheme(8, self.config.input_symmetric, not self.config.is_static_input_scheme)
        weights = Weights(8, w.data, scale.data, None, list(layer.logical_widths))
        finish(layer, product_of(layer, weights, Inputs(inputs, input_scale, input_zero_point)), self.layer_param_names)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = layer.pyquant(x, bias)
        return y


class PyquantMixedLinearKernel(MPLinearKernel):  # type: ignore[misc]
    """Packed weights of 4 and 8 bits, a scale a channel or group. Inputs in floating point, or in 8 or 4 bits by token
    where the checkpoint says so, for which vLLM gives its kernels no word: it is read off the layer."""

    @classmethod
    def get_min_capability(cls) -> int:
        return CAPABILITY if current_platform.is_cuda() else -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> Answer:
        if c.weight_type not in _TYPES:
            return False, f"weights of type {c.weight_type}; pyquant's have 4 or 8 bits"
        if _TYPES[c.weight_type][1] != c.zero_points:
            return False, f"weights of type {c.weight_type} with zero_points={c.zero_points}"
        if c.act_type not in (torch.float32, torch.float16, torch.bfloat16):
            return False, f"inputs of type {c.act_type}"
        if c.group_size > 0 and c.partition_weight_shape[0] % c.group_size:
            return False, f"groups of {c.group_size} do not divide {c.partition_weight_shape[0]} inputs"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        w, scale = loaded(layer, self.w_q_name), loaded(layer, self.w_s_name)
        bits, affine = _TYPES[self.config.weight_type]
        k, n = self.config.partition_weight_shape
        codes = unpacked(w, bits)[:n, :k] if w.dtype == torch.int32 else w.data
        # unsigned codes and their zero points: both lose half of the range, which cancels
        zeros = unpacked(loaded(layer, self.w_zp_name or ""), bits)[:n].to(torch.int32) if affine else None
        scales = scale.data if scale.output_dim == 0 else scale.data.t()
        weights = Weights(bits, codes, scales, zeros, getattr(layer, "output_partition_sizes", None) or [n])
        names = (self.w_q_name, self.w_s_name, self.w_zp_name)
        finish(layer, product_of(layer, weights, said_inputs(layer)), names)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = layer.pyquant(x, bias)
        return y


def _runs_here(capability: int | None) -> Answer:
    if current_platform.is_cpu():
        return True, None
    if not current_platform.is_cuda():
        return False, "pyquant runs on CPUs and CUDA GPUs"
    if capability is None:
        found = current_platform.get_device_capability()
        capability = None if found is None else found.to_int()
    if capability is not None and capability < CAPABILITY:
        return False, f"pyquant needs capability {CAPABILITY}, not {capability}"
    return True, None
