"""enable() and disable(): the one method in which peft chooses a LoRA layer, and two checks beside it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

from peft import LoraConfig
from peft.tuners import tuners_utils
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.integrations.peft import refusals
from pyquant.integrations.peft.layer import PyquantLoraLinear
from pyquant.nn.experts import QExperts
from pyquant.nn.linear_state import LinearState
from pyquant.nn.qlinear import QLinear

ALL: Final = "all-linear"
_BEFORE: dict[str, Any] = {}
_TO_BANKS: Final = "_convert_peft_config_moe"
_CONVERSIONS: Final = "get_model_conversion_mapping"


def register(config: Any) -> Any:
    if not isinstance(config, LoraConfig):
        raise ArgumentError("config", arguments.shown(config), "a peft.LoraConfig")
    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL:
        allowed = "names of layers; peft means float layers by it until pyquant.integrations.peft.enable() is called"
        raise ArgumentError("target_modules", repr(config.target_modules), allowed)
    refusals.check_config(config)
    config._register_custom_module({QLinear: PyquantLoraLinear})
    return config


def enable() -> None:
    if _BEFORE:
        return
    _BEFORE["create"] = LoraModel.__dict__["_create_new_module"]
    _BEFORE["all"] = tuners_utils._maybe_include_all_linear_layers
    _BEFORE["check"] = ModulesToSaveWrapper.check_module
    LoraModel._create_new_module = staticmethod(_creating(LoraModel._create_new_module))  # type: ignore[method-assign]
    tuners_utils._maybe_include_all_linear_layers = _including(tuners_utils._maybe_include_all_linear_layers)
    ModulesToSaveWrapper.check_module = _checking(ModulesToSaveWrapper.check_module)  # type: ignore[method-assign]
    for module, name, wrapped in _of_banks():
        _BEFORE[f"{module.__name__}.{name}"] = (module, name, getattr(module, name))
        setattr(module, name, wrapped(getattr(module, name)))


def disable() -> None:
    if not _BEFORE:
        return
    LoraModel._create_new_module = _BEFORE.pop("create")  # type: ignore[method-assign]
    tuners_utils._maybe_include_all_linear_layers = _BEFORE.pop("all")
    ModulesToSaveWrapper.check_module = _BEFORE.pop("check")  # type: ignore[method-assign]
    for module, name, original in _BEFORE.values():
        setattr(module, name, original)
    _BEFORE.clear()


def _creating(original: Any) -> Any:
    @functools.wraps(original)
    def _create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, QLinear):
            return PyquantLoraLinear(target, adapter_name, config=lora_config, **kwargs)
        if why := refusals.unsupported(base, kwargs.get("target_name") or type(base).__name__):
            raise UnsupportedError(why)
        return original(lora_config, adapter_name, target, **kwargs)

    return _create_new_module


def _including(original: Any) -> Any:
    @functools.wraps(original)
    def _maybe_include_all_linear_layers(peft_config: Any, model: nn.Module) -> Any:
        asked = getattr(peft_config, "target_modules", None)
        config = original(peft_config, model)
        if isinstance(asked, str) and asked.lower() == ALL:
            config.target_modules |= _quantised_linears(model, config)
        return config

    return _maybe_include_all_linear_layers


def _quantised_linears(model: Any, config: Any) -> set[str]:
    """Names of the QLinears that "all-linear" means, by the rules that peft has for Linears: no head, no part of an
    adapter that is there already."""
    heads = [model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None]
    if heads[0] is None and getattr(config, "task_type", None) == "SEQ_CLS":
        heads = [getattr(model, name, None) for name in SEQ_CLS_HEAD_NAMES]
    tuners: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    inside = {id(module) for tuner in tuners for module in tuner.modules()}
    left = inside | {id(head) for head in heads}
    return {name for name, module in model.named_modules() if isinstance(module, QLinear) and id(module) not in left}


def _of_banks() -> Iterator[tuple[ModuleType, str, Callable[[Any], Any]]]:
    """What peft and transformers do to configurations and files of adapters because experts are parameters of three
    dimensions in transformers 5: for banks whose experts are layers it must not be done."""
    for place, names in (
        ("peft.utils.transformers_weight_conversion", (_TO_BANKS, _CONVERSIONS)),
        ("transformers.integrations.peft", (_CONVERSIONS,)),
    ):
        try:
            module = importlib.import_module(place)
        except ImportError:  # an older peft, or no transformers
            continue
        for name in names:
            if hasattr(module, name):
                yield module, name, _leaving_targets if name == _TO_BANKS else _leaving_files


def _leaving_targets(original: Any) -> Any:
    @functools.wraps(original)
    def _convert_peft_config_moe(peft_config: Any, model: nn.Module) -> None:
        if not _has_banks(model):
            original(peft_config, model)

    return _convert_peft_config_moe


def _leaving_files(original: Any) -> Any:
    @functools.wraps(original)
    def get_model_conversion_mapping(model: nn.Module, *args: Any, **kwargs: Any) -> list[Any]:
        conversions = original(model, *args, **kwargs)
        # converters join tensors, such as those of experts; renamings are left
        return [c for c in conversions if not getattr(c, "operations", None)] if _has_banks(model) else conversions

    return get_model_conversion_mapping


def _has_banks(model: nn.Module) -> bool:
    return any(isinstance(module, QExperts) for module in model.modules())


def _checking(original: Any) -> Any:
    @functools.wraps(original)
    def check_module(self: Any) -> None:
        """Refuses quantised layers: all that is trained of them would be a stand-in without numbers."""
        original(self)
        names = [type(m).__name__ for m in self.original_module.modules() if isinstance(m, LinearState)]
        if names:
            got = f"a {type(self.original_module).__name__} with quantised layers ({names[0]})"
            raise ArgumentError("modules_to_save", got, "float layers: leave these out of quantize_ to train them")

    return check_module
