"""What quantize_ answers where it can do nothing: what is missing, and which way leads on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import nn

from pyquant.core.names import listed
from pyquant.core.presets import PRESETS, preset_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.nn.linear_state import LinearState
from pyquant.nn.obstacles import holds_foreign_codes

QUANTISED: Final = LinearState


def no_ranges(layers: Mapping[str, QScheme], argument: str) -> ArgumentError:
    """Layers (with their schemes) whose inputs are static, without data or a scale: `argument` gives the usual one."""
    name = preset_name(next(iter(layers.values()))) or "their scheme"
    head, bracket, options = name.partition("(")
    dynamic = f"{head}Dynamic"
    instead = f" {dynamic}{bracket}{options}, which needs none;" if dynamic in PRESETS else ""
    got = f"nothing for {listed(list(layers))}: {name} has static input ranges"
    allowed = f"data to find them with (`pyquant quantize --data FN`);{instead} or input_scales (docs/calibration.md)"
    return ArgumentError(argument, got, allowed)


def no_layers(model: nn.Module) -> ArgumentError:
    """A model in which there is no float layer to convert."""
    if is_wholly_quantised(model):
        return already_quantised(model)
    got = f"a {type(model).__name__} without nn.Linear or nn.Conv2d layers"
    return ArgumentError("model", got, "a model with layers to convert")


def is_wholly_quantised(model: nn.Module, leaves: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether a model has integer layers, and none of the classes `leaves` that could become one."""
    modules = list(model.modules())
    return any(isinstance(m, QUANTISED) for m in modules) and not any(isinstance(m, leaves) for m in modules)


def already_quantised(model: nn.Module) -> ArgumentError:
    """A model whose layers are integers already."""
    names = [name for name, module in model.named_modules() if isinstance(module, QUANTISED)]
    count = "1 layer" if len(names) == 1 else f"{len(names)} layers"
    got = f"a {type(model).__name__} that is quantised already ({count}: {listed([repr(name) for name in names])})"
    return ArgumentError("model", got, "a float model; for another scheme start from that, or call dequantize_ first")


def check_no_foreign_codes(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise ArgumentError where another library has quantised every one of the layers that were meant."""
    meant = list(layers)
    if meant and all(holds_foreign_codes(layer) for layer in meant):
        count = "1 layer" if len(meant) == 1 else f"{len(meant)} layers"
        got = f"a {type(model).__name__} that another library has quantised already ({count} hold its codes)"
        allowed = (
            "a float model; load_quantized_ reads such a folder's codes, and so does from_pretrained after "
            "integrations.transformers.enable()"
        )
        raise ArgumentError("model", got, allowed)


def check_not_simulating(model: nn.Module, layers: Iterable[nn.Module] | None = None) -> None:
    """Raise ArgumentError where some of the layers (None: any in the model) simulate what they are to become. They are
    float layers with a forward of their own, which would be left, or saved, as such without a word."""
    asked = None if layers is None else {id(layer) for layer in layers}
    modules = [(n, m) for n, m in model.named_modules() if asked is None or id(m) in asked]
    names = [name for name, module in modules if hasattr(module, "fake_quantizers")]
    if names:
        count = "1 layer" if len(names) == 1 else f"{len(names)} layers"
        shown = listed([repr(name) for name in names])
        got = f"a {type(model).__name__} that simulates its quantised layers ({count}: {shown})"
        raise ArgumentError("model", got, "no fake quantisation: call convert_ first, or remove_fake_quantize_")


def check_not_double(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise ArgumentError where float64 keeps every one of the layers that were to be quantised as it is."""
    double = [layer for layer in layers if getattr(layer, "weight", None) is not None]
    if double and all(layer.weight.dtype == torch.float64 for layer in double):
        got = f"a {type(model).__name__} of float64, which no kernel multiplies ({len(double)} layers)"
        raise ArgumentError("model", got, "float32, float16 or bfloat16: call model.float() first")


_INSTEAD: Final = (
    "quantise first, then parallelize_module or fully_shard; a model that parallelize_module has cut already is for "
    "quantize_sharded_ of pyquant.integrations.distributed, one that fully_shard has cut for quantize_from_shards_ "
    "(docs/distributed.md)"
)


def check_not_sharded(model: nn.Module, instead: str = _INSTEAD) -> None:
    """Raise UnsupportedError for a model whose parameters are cut over several processes."""
    for name, parameter in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in type(parameter.data).__mro__):
            raise UnsupportedError(f"parameter '{name}' is a DTensor: {instead}")
