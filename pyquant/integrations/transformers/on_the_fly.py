"""PyquantConfig: a model in floating point that transformers loads, quantised before from_pretrained returns it."""

from __future__ import annotations

from typing import Any

from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pyquant.errors import PyquantError, UnsupportedError
from pyquant.integrations.on_the_fly import METHOD, OnTheFly, refuse_offload
from pyquant.integrations.transformers.float_files import FloatFiles
from pyquant.integrations.transformers.held import forget_sizes, home_of
from pyquant.integrations.transformers.parallel import cutter, elsewhere, is_cut, mesh_of, quantise_cut
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
    """Quantises a model layer by layer from its files, or, where they cannot be read so, once transformers has loaded
    it."""

    quantization_config: PyquantConfig
    _files: list[str] | None = None  # of a model that is being loaded, until it is known what becomes of its layers
    _tells_sizes = False
    _layers: FloatFiles | None = None
    _model: Any = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        refuse_offload(kwargs.get("device_map"))
        if self._model is not None:  # the map that transformers has made
            forget_sizes(self._model)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._model, self._tells_sizes = model, isinstance(kwargs.get("device_map"), str)
        self._files = kwargs.get("checkpoint_files")
        return model

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """What transformers will load by is known here, and the model is still on the meta device."""
        conversions = super().update_weight_conversions(weight_conversions, model)
        files, self._files = self._files, None
        if files and all(str(file).endswith(".safetensors") for file in files):
            self._layers = self._of_files(model, files, conversions)
        return conversions

    def _of_files(self, model: Any, files: list[str], conversions: Any) -> FloatFiles | None:
        """None: transformers is to load the whole model, which then is quantised, or refused with the reason."""
        config, options = self.quantization_config.config, self.quantization_config.options
        if is_cut(model):
            options = options | {"check_speed": False}
        try:
            layers = FloatFiles(model, files, conversions, config, options, self._tells_sizes)
        except (
            PyquantError,
            RuntimeError,
        ):  # a filter that looks at numbers, of which there are none yet; blocks of a class that has a counterpart
            return None
        if is_cut(model) and not layers.is_whole:
            return None
        layers.hold(model)
        return layers

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        devices = getattr(model, "hf_device_map", None) or {}
        refuse_offload(devices)
        config, mesh, layers = self.quantization_config, mesh_of(model), self._layers
        self._layers = self._model = None
        if layers is not None:
            layers.finish(model, home_of(model, devices), cutter(model), elsewhere(model))
        elif mesh is None:
            config.quantise(model)
        else:
            quantise_cut(model, config.config, config.options)
        self.took_over = True
        return model


auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, PyquantConfig)
auto.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, PyquantHfQuantizer)
