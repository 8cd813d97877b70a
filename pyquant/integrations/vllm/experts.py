"""Experts of a mixture under the method `pyquant`: a QExperts in vLLM's RoutedExperts, filled by vLLM's own loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from pyquant.core.dtypes import FLOATS, KERNEL_BITS
from pyquant.integrations.vllm.layer import loaded, told_once
from pyquant.integrations.vllm.product import Inputs, Product, Weights, input_scheme, refused, unpacked
from pyquant.integrations.vllm.tally import packed
from pyquant.nn.expert_rules import ExpertsRule
from pyquant.nn.experts import QExperts, bank_of
from pyquant.numerics.activation import ACTIVATIONS

_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Served:
    """What a checkpoint says of experts that pyquant serves.

    bits, group_size  of the weights; None: a scale a channel.
    inputs            bits of dynamic codes by token and whether they are symmetric; None: floating point.
    is_packed         whether codes lie in int32 words or one a byte.
    """

    bits: int
    group_size: int | None
    inputs: tuple[int, bool] | None
    is_packed: bool


def why_left(layer: Any, said: Mapping[str, Any], format_name: str | None) -> str | Served:
    """What pyquant serves of the experts of a layer, or why it leaves them to vLLM.

    layer  vLLM's RoutedExperts, as far as it is built when it asks for a method.
    said   'weights' and 'input_activations' of the group of the file that names the experts.
    """
    weights, inputs = said["weights"], said.get("input_activations")
    told = tuple(_text(getattr(weights, name)) for name in ("type", "strategy"))
    if told[0] != "int" or weights.num_bits not in KERNEL_BITS or told[1] not in ("channel", "group"):
        return f"weights of {weights.num_bits} bits, type {told[0]}, strategy {told[1]}"
    if not weights.symmetric or weights.dynamic:
        return "zero points of weights"
    of_inputs = None
    if inputs is not None:
        is_by_token = _text(inputs.strategy) == "token" and inputs.dynamic is True
        if _text(inputs.type) != "int" or inputs.num_bits not in KERNEL_BITS or not is_by_token:
            return "inputs other than integers by token, dynamic"
        of_inputs = int(inputs.num_bits), bool(inputs.symmetric)
    activation = _text(layer.activation)
    limits = [
        name for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta") if getattr(layer, name, None) is not None
    ]
    if activation not in ACTIVATIONS or limits:  # vLLM calls them by the same names
        return f"activation {activation}{' with ' + ', '.join(limits) if limits else ''}"
    if layer.moe_config.has_bias:
        return "biases"
    if layer.apply_router_weight_on_input:
        return "routing weights on the inputs"
    size = int(weights.group_size) if told[1] == "group" and weights.group_size else None
    return Served(int(weights.num_bits), size, of_inputs, format_name == "pack-quantized")


class PyquantExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Experts in integers, or weight-only: on each rank those that it holds, or its share of all.

    name  of the layer, for errors.
    """

    def __init__(self, moe: Any, served: Served, name: str) -> None:
        super().__init__(moe)
        self.served, self.name = served, name

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.pyquant_dtype = params_dtype if params_dtype in FLOATS else torch.float32
        loader, served = extra_weight_attrs["weight_loader"], self.served
        per_word = 32 // served.bits
        sizes = {"w13": (2 * intermediate_size_per_partition, hidden_size)}
        sizes["w2"] = (hidden_size, intermediate_size_per_partition)
        for part, (n, k) in sizes.items():
            group = served.group_size or k
            if k % group or (served.is_packed and k % per_word):
                allowed = f"multiples of {group if k % group else per_word} on every rank"
                raise refused(self.name, "experts", f"{k} inputs of {part}", allowed)
            if served.is_packed:
                _make(
                    layer,
                    f"{part}_weight_packed",
                    torch.zeros(num_experts, n, k // per_word, dtype=torch.int32),
                    loader,
                )
                _make(layer, f"{part}_weight_shape", torch.empty(num_experts, 2, dtype=torch.int64), loader)
            else:
                _make(layer, f"{part}_weight", torch.zeros(num_experts, n, k, dtype=torch.int8), loader)
            unset = torch.full((num_experts, n, k // group), float("nan"), dtype=torch.float32)
            _make(layer, f"{part}_weight_scale", unset, loader, "group" if served.group_size else "channel")

    def process_weights_after_loading(self, layer: Any) -> None:
        names = [f"{part}_weight{'_packed' if self.served.is_packed else ''}" for part in ("w13", "w2")]
        held = [loaded(layer, name).data for name in names]
        scales = [loaded(layer, f"{part}_weight_scale").data for part in ("w13", "w2")]
        layers = [
            tuple(self._layer(codes[e], scale[e], layer.pyquant_dtype) for codes, scale in zip(held, scales))
            for e in range(len(held[0]))
        ]
        activation = ACTIVATIONS[_text(layer.activation)].plain
        layer.pyquant = bank_of(layers, ExpertsRule(up=_UP, down=_DOWN, gate=partial(_gated, activation)))
        told_once(str(layers[0][0].scheme), self.name)
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            setattr(layer, name, None)
        packed(layer)

    def _layer(self, held: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        served = self.served
        codes = (
            unpacked(SimpleNamespace(data=held, packed_dim=1, output_dim=0), served.bits) if served.is_packed else held
        )
        inputs = None if served.inputs is None else Inputs(input_scheme(*served.inputs, dynamic=True))
        weights = Weights(served.bits, codes, scale, None, [len(codes)])
        return Product(weights, inputs, None, dtype, self.name).parts[0]

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """vLLM runs shared experts itself. Experts of other ranks have the number -1 here, and add nothing."""
        places = layer.expert_map
        ids = topk_ids if places is None else places[topk_ids.long()]
        bank: QExperts = layer.pyquant
        return bank(x, ids, topk_weights)


def _make(layer: Any, name: str, data: Tensor, loader: Any, scales: str = "") -> None:
    """A parameter as vLLM's loader of experts knows it. scales: how many a matrix has."""
    parameter = nn.Parameter(data, requires_grad=False)
    parameter.weight_loader = loader  # type: ignore[attr-defined]
    if scales:
        parameter.quant_method = scales  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)


def _gated(activation: Callable[[Tensor], Tensor], module: Any, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return activation(gate) * up


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
