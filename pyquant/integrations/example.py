"""An example input for models that say by themselves what they take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyquant.errors import ArgumentError
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear

_ROWS = 4
_PIXELS = 32


def example_for(model: nn.Module) -> Any:
    """Inputs of small numbers for a model: a tensor, or keyword arguments.

    Raises ArgumentError where neither the model's class nor its first layer tells what it takes.

    Example:
        >>> example_for(nn.Sequential(nn.Linear(8, 4), nn.ReLU())).shape
        torch.Size([4, 8])
    """
    from pyquant.integrations import transformers

    if transformers.is_model(model):
        return transformers.example_of(model)
    layer = model
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    example = _for_layer(layer)
    if example is None:
        allowed = "a tensor, a tuple of arguments or a mapping of keyword arguments that the model takes"
        raise ArgumentError("example_inputs", f"none, and a {type(model).__name__} does not say what it takes", allowed)
    return example


def _for_layer(layer: nn.Module) -> Tensor | None:
    generator = torch.Generator().manual_seed(0)
    weight = next((t for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()), None)
    if weight is None:
        return None
    if isinstance(layer, (nn.Embedding, QEmbedding)):
        ids = torch.randint(max(layer.num_embeddings, 1), (_ROWS, _ROWS), generator=generator, device="cpu")
        return ids.to(weight.device)
    if isinstance(layer, (nn.Linear, QLinear)):
        size: tuple[int, ...] = (_ROWS, layer.in_features)
    elif isinstance(layer, (nn.Conv2d, QConv2d)):
        size = (1, layer.in_channels, _PIXELS, _PIXELS)
    else:
        return None
    return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(weight.device, weight.dtype)
