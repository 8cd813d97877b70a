"""The parameters of a layer under the method `pyquant`: those of compressed-tensors files, with scales in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from vllm.distributed.utils import verify_group_size_divides_partition
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

from pyquant.core.dtypes import KERNEL_BITS, KERNEL_BITS_TEXT
from pyquant.core.scheme import TensorScheme
from pyquant.errors import CheckpointError
from pyquant.integrations.vllm.kernels import CAPABILITY
from pyquant.integrations.vllm.layer import finish, loaded, product_of
from pyquant.integrations.vllm.product import Inputs, Weights, input_scheme, refused, unpacked

UNSET: Final = -(2**31)  # of whole numbers that no file has filled: no zero point


class PyquantScheme(CompressedTensorsScheme):  # type: ignore[misc]
    """Integer weights of one layer, and how its inputs are quantised.

    weights, inputs  QuantizationArgs of the file's group; inputs None: floating point.
    packed           whether codes lie in int32 words ('pack-quantized') or one a byte.
    narrow           whether symmetric static inputs leave the lowest code out.
    two_level        the scheme of weights whose group scales have two levels, or None: the format has no word for it.
    Raises CheckpointError naming the layer for what pyquant has no product for.
    """

    def __init__(
        self, weights: Any, inputs: Any, *, packed: bool, narrow: bool, two_level: TensorScheme | None, name: str
    ) -> None:
        self.name, self.packed = name, packed
        self.two_level = two_level
        self.bits, self.symmetric = int(weights.num_bits), bool(weights.symmetric)
        self.strategy = text(weights.strategy)
        self.group_size = int(weights.group_size or 0) if self.strategy == "group" else None
        if self.bits not in KERNEL_BITS:
            raise self._refused("weights", f"{self.bits} bits", KERNEL_BITS_TEXT)
        if self.strategy not in ("tensor", "channel", "group") or weights.dynamic:
            raise self._refused(
                "weights", f"strategy {self.strategy}, dynamic {weights.dynamic}", "tensor, channel, group"
            )
        self.inputs = None if inputs is None else self._inputs(inputs, narrow)
        if self.inputs is not None and not self.symmetric:
            got = "zero points of weights whose inputs are quantised"
            raise self._refused("weights", got, "symmetric weights, or floating-point inputs")

    def _inputs(self, said: Any, narrow: bool) -> TensorScheme:
        strategy, dynamic = text(said.strategy), said.dynamic is True
        if (
            text(said.type) != "int"
            or said.num_bits not in KERNEL_BITS
            or strategy != ("token" if dynamic else "tensor")
        ):
            got = f"type {text(said.type)}, {said.num_bits} bits, strategy {strategy}, dynamic {said.dynamic}"
            raise self._refused("inputs", got, "integers of 4 or 8 bits, dynamic by token or static by tensor")
        return input_scheme(said.num_bits, bool(said.symmetric), dynamic, narrow)

    def _refused(self, part: str, got: str, allowed: str) -> CheckpointError:
        return refused(self.name, part, got, allowed)

    @classmethod
    def get_min_capability(cls) -> int:
        return CAPABILITY

    def create_weights(
        self,
        layer: Any,
        output_size: int,
        input_size: int,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., Any],
        **_: Any,
    ) -> None:
        n, k, parts = sum(output_partition_sizes), input_size_per_partition, len(output_partition_sizes)
        layer.logical_widths = layer.output_partition_sizes = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = k, n
        layer.params_dtype = params_dtype
        groups = 1
        if self.group_size is not None:
            verify_group_size_divides_partition(k, self.group_size, self.name)
            groups = k // self.group_size
        if self.two_level is not None and k != input_size:
            raise self._refused("a rank's share", "some groups of a channel in two levels", "all: one rank")
        per_word = 32 // self.bits
        if self.packed and k != input_size and k % per_word:
            raise self._refused(
                "a rank's share", f"{k} inputs", f"a multiple of {per_word}: its words hold as many codes"
            )
        make = _Maker(layer, weight_loader)
        if self.packed:
            words = torch.empty(n, -(-k // per_word), dtype=torch.int32)
            packing = {"packed_dim": 1, "packed_factor": per_word}
            make("weight_packed", PackedvLLMParameter, words, input_dim=1, output_dim=0, **packing)
            make("weight_shape", BasevLLMParameter, torch.empty(2, dtype=torch.int64))
        else:
            make("weight", ModelWeightParameter, torch.empty(n, k, dtype=torch.int8), input_dim=1, output_dim=0)
        if self.strategy == "tensor":
            make("weight_scale", PerTensorScaleParameter, _numbers(parts))
        elif self.strategy == "channel":
            make("weight_scale", ChannelQuantScaleParameter, _numbers(n, 1), output_dim=0)
        else:
            make("weight_scale", GroupQuantScaleParameter, _numbers(n, groups), output_dim=0, input_dim=1)
        if not self.symmetric:
            self._make_zero_points(make, output_partition_sizes, groups)
        if self.inputs is not None and not self.inputs.dynamic:
            make("input_scale", PerTensorScaleParameter, _numbers(parts))
            if not self.inputs.symmetric:
                make("input_zero_point", PerTensorScaleParameter, torch.full((parts,), UNSET, dtype=torch.int32))

    def _make_zero_points(self, make: _Maker, widths: Sequence[int], groups: int) -> None:
        """Packed along N, as the files have them, but for those of whole tensors and of codes one a byte."""
        name, n, per_word = "weight_zero_point", sum(widths), 32 // self.bits
        if self.strategy == "tensor":
            make(name, PerTensorScaleParameter, torch.full((len(widths),), UNSET, dtype=torch.int32))
            return
        rows, packing = n, {}
        if self.packed:
            if any(width % per_word for width in widths) and len(widths) > 1:
                raise self._refused(
                    "zero points", f"of {list(widths)} outputs", f"multiples of {per_word}, a word's codes"
                )
            rows, packing = -(-n // per_word), {"packed_dim": 0, "packed_factor": per_word}
        numbers = torch.full((rows, groups), UNSET if not self.packed else 0, dtype=torch.int32)
        if self.strategy == "channel":
            kind = PackedColumnParameter if self.packed else ChannelQuantScaleParameter
            make(name, kind, numbers, output_dim=0, **packing)
        else:
            kind = PackedvLLMParameter if self.packed else GroupQuantScaleParameter
            make(name, kind, numbers, output_dim=0, input_dim=1, **packing)

    def process_weights_after_loading(self, layer: Any) -> None:
        held = loaded(layer, "weight_packed" if self.packed else "weight")
        n, k = layer.output_size_per_partition, layer.input_size_per_partition
        codes = unpacked(held, self.bits)[:n, :k] if self.packed else held.data
        zeros = None if self.symmetric else self._zero_points(loaded(layer, "weight_zero_point"), n)
        weights = Weights(
            self.bits, codes, loaded(layer, "weight_scale").data, zeros, list(layer.logical_widths), self.two_level
        )
        inputs = None
        if self.inputs is not None:
            numbers = [getattr(layer, name, None) for name in ("input_scale", "input_zero_point")]
            inputs = Inputs(self.inputs, *(None if one is None else one.data for one in numbers))
        finish(
            layer,
            product_of(layer, weights, inputs),
            [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"],
        )

    def _zero_points(self, held: Any, n: int) -> Tensor:
        numbers = held.data
        if self.packed and self.strategy != "tensor":
            numbers = unpacked(held, self.bits)[:n].to(torch.int32)
        return numbers

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = layer.pyquant(x, bias)
        return y


class _Maker:
    """Registers parameters of vLLM's classes, which know how shards of a file come into them."""

    def __init__(self, layer: Any, weight_loader: Callable[..., Any]) -> None:
        self._layer, self._loader = layer, weight_loader

    def __call__(self, name: str, kind: Any, data: Tensor, **dims: int) -> None:
        self._layer.register_parameter(name, kind(data=data, weight_loader=self._loader, **dims))


def _numbers(*shape: int) -> Tensor:
    """Scales that no file has filled are NaN, which is refused after loading."""
    return torch.full(shape, float("nan"), dtype=torch.float32)


def text(value: Any) -> str:
    """Names are enumerations in some versions of compressed-tensors and texts in others."""
    return str(getattr(value, "value", value))
