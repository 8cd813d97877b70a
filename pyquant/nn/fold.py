"""fold_batch_norm_: a BatchNorm after a Linear or a convolution becomes part of its weights, before quantising."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.nn import obstacles
from pyquant.nn.fuse_rules import batch_norms_of, neighbours
from pyquant.nn.listed import exchange_listed
from pyquant.nn.swap import uses_of
from pyquant.nn.undo import put, undone_on_error

_FITS = {nn.Linear: (nn.BatchNorm1d,), nn.Conv2d: (nn.BatchNorm2d, nn.SyncBatchNorm)}


def fold_batch_norm_(model: nn.Module) -> nn.Module:
    """Fold every BatchNorm that directly follows a Linear or Conv2d into that layer's weight and bias, in place.

    model  float model in evaluation mode: what is folded are the running statistics.
    ->     the model. Each folded BatchNorm is an nn.Identity now; the layer has a bias and new Parameters.
    Where: neighbours in an nn.Sequential, and what register_batch_norm names. A BatchNorm1d after a Linear is taken to
    see [B, C]. Left alone: layers that are shared, tied, hooked or have computed weights; a BatchNorm without running
    statistics. Computed in float64 and rounded once: weight * f and (bias - mean) * f + beta with
    f = gamma / sqrt(var + eps).
    Transactional. Raises ArgumentError naming a BatchNorm in training mode, NonFiniteError where a folded number is not
    finite. To load a checkpoint of a folded model, build that model with fold_batch_norm_ as well.
    Source: docs/numerics.md 12.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
        >>> fold_batch_norm_(model)[1], model[0].bias.shape
        (Identity(), torch.Size([8]))
    """
    arguments.module("model", model)
    folds = [(*pair, *_folded(*pair)) for pair in _pairs(model)]
    with undone_on_error() as undo:
        exchanged: dict[int, nn.Module] = {}
        for layer, parent, name, _, weight, bias in folds:
            is_trained = layer._parameters["weight"].requires_grad  # type: ignore[union-attr]
            put(layer._parameters, "weight", nn.Parameter(weight, is_trained), undo)
            put(layer._parameters, "bias", nn.Parameter(bias, is_trained), undo)
            norm: Any = parent._modules[name]
            exchanged[id(norm)] = nn.Identity().train(norm.training)
            put(parent._modules, name, exchanged[id(norm)], undo)
        exchange_listed(model.modules(), exchanged, undo)
    return model


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, str, str]]:
    """(layer, parent of the BatchNorm, its name there, its full name)."""
    uses = uses_of(model)
    tied = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for path, parent in model.named_modules():
        for first, second in (*neighbours(parent), *batch_norms_of(parent)):
            layer, norm = parent._modules.get(first), parent._modules.get(second)
            if layer is None or norm is None or type(norm) not in _FITS.get(type(layer), ()):  # type: ignore[call-overload]
                continue
            if uses[id(layer)] != 1 or uses[id(norm)] != 1 or any(tied[id(p)] > 1 for p in layer.parameters()):
                continue
            if "forward" in layer.__dict__ or "forward" in norm.__dict__:
                continue
            if obstacles.has_hooks(layer) or obstacles.has_hooks(norm) or parametrize.is_parametrized(layer):
                continue
            weight = layer._parameters.get("weight")
            if weight is None or weight.dtype not in FLOATS or norm.running_mean is None:
                continue
            name = f"{path}.{second}" if path else second
            if norm.training:
                raise ArgumentError("model", f"'{name}' in training mode", "evaluation mode: call model.eval() first")
            if norm.num_features != weight.shape[0]:
                got = f"'{name}' of {norm.num_features} features after {weight.shape[0]} channels"
                raise ArgumentError("model", got, "equal numbers")
            yield layer, parent, second, name


def _folded(layer: nn.Module, parent: nn.Module, second: str, name: str) -> tuple[Tensor, Tensor]:
    norm: Any = parent._modules[second]
    weight, bias = cast(Tensor, layer._parameters["weight"]), layer._parameters.get("bias")
    with torch.no_grad():
        mean, var = norm.running_mean.double(), norm.running_var.double()
        gamma = torch.ones_like(var) if norm.weight is None else norm.weight.double()
        beta = torch.zeros_like(var) if norm.bias is None else norm.bias.double()
        factor = gamma / torch.sqrt(var + norm.eps)
        new_weight = (weight.double() * factor.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
        shift = (0.0 if bias is None else bias.double()) - mean
        new_bias = (shift * factor + beta).to(weight.dtype)
    for what, tensor in (("weight", new_weight), ("bias", new_bias)):
        if not tensor.is_meta and not bool(tensor.isfinite().all()):
            got = f"'{name}': a folded {what} that is not finite"
            raise NonFiniteError("model", got, "finite statistics and weights")
    return new_weight, new_bias
