"""The quantizer that transformers asks while it loads a compressed-tensors checkpoint, in place of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import CompressedTensorsConfig

from pyquant.errors import CheckpointError
from pyquant.integrations.on_the_fly import refuse_offload
from pyquant.integrations.transformers.conversions import takes_apart
from pyquant.integrations.transformers.held import forget_sizes, home_of
from pyquant.integrations.transformers.parallel import cutter
from pyquant.integrations.transformers.saving import Saves
from pyquant.integrations.transformers.takeover import Takeover
from pyquant.io.compressed_tensors import REFUSAL

_LOGGER = logging.get_logger(__name__)


class CompressedTensorsConfigs:
    """Makes transformers' own configuration of the words of a config.json. A folder that only pyquant reads says so,
    where that class complains of a group's weights."""

    @staticmethod
    def from_dict(config_dict: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        groups = config_dict.get("quantization_config", config_dict).get("config_groups")
        for words, group in groups.items() if isinstance(groups, dict) else ():
            if isinstance(group, dict) and group.get(REFUSAL):
                raise CheckpointError(f"quantization_config: {words}")
        return CompressedTensorsConfig.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)


class PyquantCompressedTensorsHfQuantizer(Saves, CompressedTensorsHfQuantizer):  # type: ignore[misc]
    """Loads int8 and int4 codes into QLinears; leaves everything else to the class that it replaces."""

    _takeover: Takeover | None = None
    _model: Any = None  # while it is loaded

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        super().validate_environment(*args, **kwargs)
        refuse_offload(kwargs.get("device_map"))
        if self._model is not None:  # the map that transformers has made
            forget_sizes(self._model)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        reason = self._left_alone()
        files = kwargs.get("checkpoint_files")
        if reason or not files:
            _LOGGER.warning(f"pyquant leaves this checkpoint to transformers: {reason or 'it has no files'}")
            super()._process_model_before_weight_loading(model, **kwargs)
            return
        self._model, tells_sizes = model, isinstance(kwargs.get("device_map"), str)
        is_joined = takes_apart(model)
        self._takeover = Takeover(model, [Path(file) for file in files], _renamer(model), tells_sizes)
        joined = [name for name in self._takeover.not_here if is_joined(f"{name}.weight")]
        if joined:
            raise CheckpointError(
                f"layer '{joined[0]}': codes of layers that {type(model).__name__} has otherwise, joined or parted; "
                "allowed: layers under the model's own names, as pyquant.save_pretrained and this version of pyquant "
                "write them: save the quantised model again"
            )
        if self._takeover.not_here:
            _LOGGER.info(f"{type(model).__name__} has no place for the layers {', '.join(self._takeover.not_here)}")

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """As the model has them: what transformers still loads is in floating point, with nothing to decompress."""
        return weight_conversions if self._takeover else super().update_weight_conversions(weight_conversions, model)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        kind = str(param.get_dtype() if hasattr(param, "get_dtype") else param.dtype)
        if self._takeover is not None and dtype is not None and dtype.is_floating_point and "F" not in kind.upper():
            names = ", ".join(getattr(converter, "source_patterns", ()) or ())
            raise CheckpointError(
                f"tensor '{names}': codes of type {kind} for a parameter in floating point; allowed: weights of layers "
                "whose names in file and model agree, without key_mapping"
            )
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._takeover is None:
            return super()._process_model_after_weight_loading(model, **kwargs)
        devices = getattr(model, "hf_device_map", None) or {}
        refuse_offload(devices)
        count = self._takeover.finish(model, home_of(model, devices), cutter(model))
        self._takeover = self._model = None
        self.took_over = True
        _LOGGER.info(f"pyquant runs {count} layers in integers")
        return model

    def _left_alone(self) -> str:
        """Why the class that this one replaces is to load the checkpoint, or ''."""
        config = self.quantization_config
        if config.dequantize:
            return "dequantize=True asks for a model in floating point"
        if not config.is_quantization_compressed:
            return "its weights are not stored as codes"
        inner: Any = config.quantization_config
        kinds = {str(getattr(group.weights, "type", "")) for group in inner.config_groups.values() if group.weights}
        other = sorted(kind for kind in kinds if not kind.lower().endswith("int"))
        return f"its codes are of type {', '.join(other)}, and pyquant computes with integers" if other else ""


def _renamer(model: Any) -> Callable[[str], str]:
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    state, prefix = model.state_dict(), model.base_model_prefix
    return lambda key: str(rename_source_key(key, renamings, [], prefix, state)[0])
