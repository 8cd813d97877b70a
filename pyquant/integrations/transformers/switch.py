"""enable() and disable(): entries of transformers' own tables, and the one method that is wrapped."""

from __future__ import annotations

import functools
from typing import Any, Final

from transformers import PreTrainedModel
from transformers.quantizers import auto

from pyquant.integrations.transformers.conversions import names_of_floats
from pyquant.integrations.transformers.on_the_fly import PyquantConfig, PyquantHfQuantizer
from pyquant.integrations.transformers.quantizer import (
    CompressedTensorsConfigs,
    PyquantCompressedTensorsHfQuantizer,
)
from pyquant.io.pretrained.save import has_codes

METHOD: Final = "compressed-tensors"
_WRITTEN: Final = ("quantization_config", "tie_word_embeddings")  # of a configuration, when its model is saved
_BEFORE: dict[str, Any] = {}


def enable() -> None:
    if _BEFORE:
        return
    _BEFORE["quantizer"] = auto.AUTO_QUANTIZER_MAPPING[METHOD]
    _BEFORE["save"] = PreTrainedModel.save_pretrained
    _BEFORE["config"] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD]
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = PyquantCompressedTensorsHfQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = CompressedTensorsConfigs
    PreTrainedModel.save_pretrained = _saving(PreTrainedModel.save_pretrained)  # type: ignore[method-assign]


def disable() -> None:
    if not _BEFORE:
        return
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = _BEFORE.pop("quantizer")
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = _BEFORE.pop("config")
    PreTrainedModel.save_pretrained = _BEFORE.pop("save")  # type: ignore[method-assign]


def _saving(original: Any) -> Any:
    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Lends a quantizer, which knows the tensors, to a model that was quantised without transformers."""
        if getattr(self, "hf_quantizer", None) is not None or not has_codes(self):
            try:
                return original(self, *args, **kwargs)
            finally:
                names_of_floats(self)
        words = self.config.__dict__
        had = {key: words[key] for key in _WRITTEN if key in words}
        self.hf_quantizer = PyquantHfQuantizer(PyquantConfig(), pre_quantized=False)
        try:
            return original(self, *args, **kwargs)
        finally:
            del self.hf_quantizer
            names_of_floats(self)
            for key in _WRITTEN:
                words.pop(key, None)
            words |= had

    return save_pretrained
