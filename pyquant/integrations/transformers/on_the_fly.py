"""PyquantConfig: a model in floating point that transformers loads, quantised before from_pretrained returns it."""

from __future__ import annotations

from typing import Any

from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pyquant.errors import UnsupportedError
from pyquant.integrations.on_the_fly import METHOD, OnTheFly, refuse_offload
from pyquant.integrations.transformers.parallel import mesh_of, quantise_cut
from pyquant.integrations.transformers.saving import Saves


class PyquantConfig(OnTheFly, QuantizationConfigMixin):  # type: ignore[misc]
    """What `from_pretrained(..., quantization_config=PyquantConfig("W8A8Dynamic"))` quantises a model by.

    config   as of quantize_: the name of a scheme, a QScheme or its preset, {name, pattern or type: scheme}, a Recipe,
             or the path of its file. Static schemes need data, which from_pretrained has none of: they are refused.
    options  of quantize_ that need no data: embeddings, heads, on_indivisible, filter_fn, check_speed.
    Heads and what is tied to them stay in floating point unless heads=True. Experts are quantised one by one.
    Raises ArgumentError for wrong options; what quantize_ refuses it refuses while the model is loaded.

    Example:
        >>> PyquantConfig("W4A16(group_size=64)").quant_method
        'pyquant'
    """

    @classmethod
    def from_dict(cls, config_dict: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Refuses a config.json that names this method: pyquant writes no such file."""
        raise UnsupportedError(
            "config.json with quant_method 'pyquant'; allowed: a model in floating point, or 'compressed-tensors', "
            "which save_pretrained of pyquant and of transformers write"
        )


class PyquantHfQuantizer(Saves, HfQuantizer):  # type: ignore[misc]
    """Quantises the model that transformers has loaded."""

    quantization_config: PyquantConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        refuse_offload(kwargs.get("device_map"))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        refuse_offload(getattr(model, "hf_device_map", None))
        config = self.quantization_config
        if mesh_of(model) is None:
            config.quantise(model)
        else:
            quantise_cut(model, config.config, config.options)
        self.took_over = True
        return model


auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, PyquantConfig)
auto.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, PyquantHfQuantizer)
