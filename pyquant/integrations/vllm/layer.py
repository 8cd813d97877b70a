"""From the parameters of a vLLM layer to its Product, and what the layer keeps afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A8Int
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from pyquant.integrations.vllm.product import Inputs, Product, Weights, input_scheme, refused
from pyquant.integrations.vllm.tally import packed

# Below vllm's own logger, which decides what is shown and where.
logger = logging.getLogger("vllm.pyquant")
_TOLD: set[str] = set()


def name_of(layer: nn.Module) -> str:
    return str(getattr(layer, "prefix", "")) or type(layer).__name__


def product_of(layer: nn.Module, weights: Weights, inputs: Inputs | None) -> Product:
    """The Product of a layer, with the bias that vLLM will ask this rank to add."""
    dtype = getattr(layer, "params_dtype", torch.float32)
    return Product(weights, inputs, bias_of(layer), dtype, name_of(layer))


def bias_of(layer: nn.Module) -> Tensor | None:
    """The bias that goes into the packed weights, or None where it is added elsewhere: vLLM hands it out
    (skip_bias_add), the first of the ranks that share a sum adds it, or (heads) the caller gives one of its own."""
    bias = getattr(layer, "bias", None)
    if bias is None or getattr(layer, "skip_bias_add", False) or isinstance(layer, VocabParallelEmbedding):
        return None
    if isinstance(layer, RowParallelLinear) and layer.tp_rank > 0:
        return None
    return bias.data


def finish(layer: nn.Module, product: Product, names: Iterable[str | None]) -> None:
    """Keep the product, let the parameters go that it was made of."""
    layer.pyquant = product
    told_once(str(product.scheme), name_of(layer))
    for name in names:
        if name and getattr(layer, name, None) is not None:
            setattr(layer, name, None)
    packed(layer)


def told_once(scheme: str, name: str) -> None:
    """The first layer of each scheme is logged."""
    if scheme not in _TOLD:
        _TOLD.add(scheme)
        logger.info("pyquant: %s is the product of layer '%s' and of those like it", scheme, name)


def loaded(layer: nn.Module, name: str) -> Any:
    """A parameter that vLLM filled. Raises CheckpointError where it was packed before: weights are loaded once."""
    found = getattr(layer, name, None)
    if found is None:
        got = "nothing, as its codes were packed for the kernel"
        raise refused(name_of(layer), name, got, "weights that are loaded once; start a new engine")
    return found


def said_inputs(layer: nn.Module) -> Inputs | None:
    """How the inputs of packed weights are quantised, which vLLM notes on the layer or its scheme; None: not at all."""
    said = getattr(layer, "_humming_input_quant_config", None)
    if said is not None:
        if said.get("type") != "int" or said.get("strategy") != "token" or not said.get("dynamic"):
            allowed = (
                "integers by token, dynamic; VLLM_DISABLED_KERNELS=PyquantMixedLinearKernel leaves the layer to vLLM"
            )
            raise refused(name_of(layer), "inputs", str(said), allowed)
        return Inputs(input_scheme(said["num_bits"], bool(said["symmetric"]), dynamic=True))
    scheme = getattr(layer, "scheme", None)
    if isinstance(scheme, CompressedTensorsW4A8Int):
        return Inputs(input_scheme(8, scheme.input_symmetric, dynamic=True))
    return None
