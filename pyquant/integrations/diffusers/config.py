"""PyquantConfig: a model in floating point that diffusers loads, quantised before from_pretrained returns it."""

from __future__ import annotations

import enum
from typing import Any

from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from pyquant.errors import UnsupportedError
from pyquant.integrations.on_the_fly import METHOD, OnTheFly, refuse_offload
from pyquant.nn.dequantize import dequantize_

_SAVE = (
    "diffusers has no files for these codes; call pyquant.save_pretrained(model, directory), and "
    "pyquant.load_pretrained(directory, model) to load; or pyquant.dequantize_(model) first"
)


class _Method(str, enum.Enum):
    """diffusers asks a method for its `value`."""

    PYQUANT = METHOD


class PyquantConfig(OnTheFly, QuantizationConfigMixin):  # type: ignore[misc]
    """What `from_pretrained(..., quantization_config=PyquantConfig("W8A8Dynamic"))` of a diffusers model quantises by.

    config   as of quantize_: the name of a scheme, a QScheme or its preset, {name, pattern or type: scheme}, a Recipe,
             or the path of its file. Static schemes need data, which from_pretrained has none of: they are refused.
    options  of quantize_ that need no data: embeddings, heads, on_indivisible, filter_fn, check_speed.
    Linears and convolutions are quantised, unless the config says otherwise.
    Raises ArgumentError for wrong options; what quantize_ refuses it refuses while the model is loaded.

    Example:
        >>> PyquantConfig({"re:.*attn.*": "W8A8Dynamic"}).quant_method.value
        'pyquant'
    """

    def __init__(self, config: Any = "W8A8Dynamic", **options: Any) -> None:
        super().__init__(config, **options)
        self.quant_method = _Method.PYQUANT

    def to_diff_dict(self) -> dict[str, Any]:
        """What diffusers shows of a configuration: all of it."""
        return self.to_dict()

    @classmethod
    def from_dict(cls, config_dict: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Refuses a config.json that names this method: pyquant writes no such file for diffusers."""
        raise UnsupportedError(
            "config.json with quant_method 'pyquant'; allowed: a model in floating point and "
            "quantization_config=PyquantConfig(...), or a directory of pyquant.save_pretrained in load_pretrained"
        )


class PyquantQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Quantises the model that diffusers has loaded."""

    quantization_config: PyquantConfig
    use_keep_in_fp32_modules = True  # what diffusers keeps in float32 without a quantizer, it keeps so with this one

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        refuse_offload(kwargs.get("device_map"))

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        return model  # as it is: floats are loaded, and a QLinear must not meet a loader of single tensors

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.quantization_config.quantise(model)
        return model

    def _dequantize(self, model: Any) -> Any:
        return dequantize_(model)

    @property
    def is_serializable(self) -> bool:
        """Asked by save_pretrained alone. Raises UnsupportedError, which says what to do."""
        raise UnsupportedError(f"save_pretrained of a quantised model: {_SAVE}")

    @property
    def is_trainable(self) -> bool:
        return True  # gradients pass through to adapters

    @property
    def is_compileable(self) -> bool:
        return True


auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, PyquantConfig)
auto.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, PyquantQuantizer)
