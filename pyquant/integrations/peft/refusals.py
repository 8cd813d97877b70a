"""What an adapter cannot be around a quantised layer, said before anything is made.

Nothing here imports peft: a configuration is read by the names of its fields.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from torch import nn

from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.nn.linear_state import LinearState
from pyquant.nn.qlinear import QLinear

# Ways to begin that read activations or nothing; others take the weight apart and write a float weight back.
_INITS: Final = (True, False, "gaussian", "orthogonal", "eva")
_INITS_TEXT: Final = "True, False, 'gaussian', 'orthogonal' or 'eva'"
_PLAIN: Final = "LoRA without a variant, also rank-stabilised (use_rslora)"


def check_config(config: Any) -> None:
    """Raise ArgumentError for a LoraConfig with a variant or a way to begin that needs float weights."""
    for field in dataclasses.fields(config):
        if field.metadata.get("is_lora_variant") and getattr(config, field.name):
            raise ArgumentError(field.name, repr(getattr(config, field.name))[:80], f"{_PLAIN}: weights are codes")
    if getattr(config, "use_qalora", False):
        raise ArgumentError("use_qalora", "True", f"{_PLAIN}: peft has QA-LoRA for GPTQ layers alone")
    init = config.init_lora_weights
    if (init.lower() if isinstance(init, str) else init) not in _INITS:
        allowed = (
            f"{_INITS_TEXT}: others take the weights apart and write the rest back, which codes cannot hold. For an "
            "adapter that was trained with one, save it with path_initial_model_for_weight_conversion"
        )
        raise ArgumentError("init_lora_weights", repr(init)[:80], allowed)


def check_bias(config: Any, layer: QLinear) -> None:
    """Raise ArgumentError where a LoraConfig wants the bias of the layer itself trained: it is no parameter."""
    if config.bias != "none" and layer.bias_ is not None:
        allowed = "'none': the bias of a quantised layer is not trained; lora_bias=True trains one of the adapter's own"
        raise ArgumentError("bias", repr(config.bias), allowed)


def check_layer(layer: QLinear, name: str) -> None:
    """Raise UnsupportedError for a layer whose result cannot be added to."""
    place = f"layer '{name}'" if name else "the layer"
    if layer.share:
        raise UnsupportedError(
            f"{place} is {layer.share}, and the factors of an adapter would be summed over no ranks: merge adapters "
            "before parallelize_module, or train with FSDP2 or data parallel"
        )
    if layer.scheme.outputs is not None:
        raise UnsupportedError(f"{place} gives codes to the next layer (link_): add adapters before link_")
    if layer.activation != "none":
        raise UnsupportedError(
            f"{place} computes {layer.activation} too (fuse_), and an adapter belongs before the activation: add "
            "adapters before fuse_"
        )


def unsupported(target: nn.Module, name: str) -> str:
    """Why a module with quantised layers, other than a QLinear, takes no adapter; '' where it has none."""
    kind, inner = type(target).__name__, [n for n, m in target.named_modules() if isinstance(m, QLinear)]
    if isinstance(target, LinearState):
        return f"'{name}' is a {kind}: LoRA is for QLinears here; take it out of target_modules, or keep it in floats"
    if inner:
        own = ", ".join(f"{name.rpartition('.')[2]}.{n}" for n in inner[:4])
        return f"'{name}' is a {kind} around quantised layers; name these in target_modules: {own}"
    return ""
