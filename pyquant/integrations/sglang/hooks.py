"""What stands in for the two methods of SGLang's W8A8 scheme. Knows SGLang's layers by their attributes alone."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.errors import CheckpointError
from pyquant.integrations.vllm.product import Inputs, Product, Weights, input_scheme

logger = logging.getLogger("sglang.pyquant")
_registered: set[str] = set()
_told: set[str] = set()  # schemes of which a layer was logged


def register(scheme: str) -> None:
    """Tell SGLang's registry what replaces the methods of a scheme, once; load_plugins() of SGLang applies it.

    Raises ImportError where this SGLang has no such registry.
    """
    try:
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        registry, kinds = hooks.HookRegistry, hooks.HookType
    except (ImportError, AttributeError) as error:
        text = "sglang has no sglang.srt.plugins.hook_registry; docs/sglang.md names the versions that have"
        raise ImportError(text) from error
    if scheme in _registered:
        return
    _registered.add(scheme)
    for method in (process_weights_after_loading, apply_weights):
        registry.register(f"{scheme}.{method.__name__}", method, kinds.REPLACE)
    logger.info("pyquant: QLinears are the products of SGLang's W8A8 layers (PYQUANT_SGLANG=prefer)")


def process_weights_after_loading(scheme: Any, layer: nn.Module) -> None:
    """Pack what SGLang loaded into the layer, and let its parameters go. The first layer of each scheme is logged.

    scheme  SGLang's, which says how inputs are quantised.
    layer   with weight int8 [N, K], weight_scale [N, 1] or one a joined matrix, logical_widths, and where inputs are
            static input_scale (and input_zero_point).
    Raises CheckpointError naming the layer for weights that were packed before, or numbers that no product has.
    """
    held: Any = layer
    name = str(getattr(layer, "prefix", "")) or type(layer).__name__
    weight, scale = getattr(held, "weight", None), getattr(held, "weight_scale", None)
    if weight is None or scale is None:
        got = "got nothing, as its codes were packed for the kernel"
        raise CheckpointError(
            f"layer '{name}': weight: {got}; allowed: weights that are loaded once; start a new engine"
        )
    inputs = Inputs(input_scheme(8, bool(scheme.input_symmetric), dynamic=not scheme.is_static_input_scheme))
    if scheme.is_static_input_scheme:
        zero = getattr(held, "input_zero_point", None)
        zero = None if zero is None else zero.data.to(torch.int32)
        inputs = Inputs(inputs.scheme, held.input_scale.data, zero)
    weights = Weights(8, weight.data, scale.data, None, list(held.logical_widths))
    held.pyquant = Product(weights, inputs, _bias_of(layer), _dtype_of(layer), name)
    runs = str(held.pyquant.scheme)
    if runs not in _told:
        _told.add(runs)
        logger.info("pyquant: %s is the product of layer '%s' and of those like it", runs, name)
    for parameter in ("weight", "weight_scale", "input_scale", "input_zero_point"):
        if getattr(layer, parameter, None) is not None:
            setattr(layer, parameter, None)


def apply_weights(scheme: Any, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N], with the bias that SGLang gives to this call."""
    held: Any = layer
    y: Tensor = held.pyquant(x, bias)
    return y


def _bias_of(layer: nn.Module) -> Tensor | None:
    """The bias that goes into the packed weights. None where it is handed on (skip_bias_add), and where ranks share a
    sum, of which the first adds it: apply_weights does then."""
    bias = getattr(layer, "bias", None)
    if bias is None or getattr(layer, "skip_bias_add", False) or hasattr(layer, "input_is_parallel"):
        return None
    return bias.data  # type: ignore[no-any-return]


def _dtype_of(layer: nn.Module) -> torch.dtype:
    dtype = getattr(layer, "params_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
