"""int8 embeddings under the method `pyquant`, which vLLM's own reader has no parameters for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from pyquant.core.dtypes import FLOATS
from pyquant.errors import CheckpointError, PyquantError
from pyquant.integrations.vllm.layer import loaded
from pyquant.integrations.vllm.product import refused
from pyquant.integrations.vllm.tally import packed
from pyquant.io.foreign.record import positive_scales
from pyquant.nn.qembedding import QEmbedding


class PyquantEmbeddingMethod(QuantizeMethodBase):  # type: ignore[misc]
    """Rows of int8 codes with a scale each, a rank's share of the vocabulary: QEmbedding.

    name  of the layer, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader, rows = extra_weight_attrs["weight_loader"], sum(output_partition_sizes)
        codes = torch.zeros(rows, input_size_per_partition, dtype=torch.int8)
        weight = ModelWeightParameter(data=codes, weight_loader=loader, input_dim=1, output_dim=0)
        # Scales that no file has filled are refused after loading.
        unset = torch.full((rows, 1), float("nan"), dtype=torch.float32)
        scale = ChannelQuantScaleParameter(data=unset, weight_loader=loader, output_dim=0)
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scale)
        layer.params_dtype = params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        codes, scale = loaded(layer, "weight").data, loaded(layer, "weight_scale").data
        dtype = layer.params_dtype if layer.params_dtype in FLOATS else torch.float32
        try:
            codes, scale, _ = positive_scales(codes, scale, None, -128)  # of rows that fill up the vocabulary: 0
            layer.pyquant = QEmbedding.from_codes(codes, scale.reshape(-1), dtype=dtype)
        except PyquantError as error:
            raise CheckpointError(f"layer '{self.name}': {error}") from None
        layer.weight = layer.weight_scale = None
        packed(layer)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        rows: Tensor = layer.pyquant(input_)
        return rows

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        raise refused(self.name, "embedding", "a product with it, as a head", "rows of it")

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        raise refused(self.name, "embedding", "a head that shares its weights", "tie_word_embeddings: false")
