"""What transformers asks when it saves a model with quantised layers: tensors and words of compressed-tensors."""

from __future__ import annotations

from typing import Any

from pyquant.integrations.transformers.conversions import keep_names, names_of_floats
from pyquant.io.pretrained.save import as_compressed_tensors, has_codes
from pyquant.nn.dequantize import dequantize_
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear


class Saves:
    """What the quantizers of pyquant answer when a model is saved, trained, compiled or made float again."""

    took_over = False

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, str]]:
        """Tensors of a compressed-tensors directory; the words that describe them go into the model's configuration.

        transformers asks this before it writes the configuration.
        """
        if not has_codes(model):
            if self.took_over:  # dequantised since
                model.config.__dict__.pop("quantization_config", None)
            names_of_floats(model)
            return super().get_state_dict_and_metadata(model)  # type: ignore[misc]
        keep_names(model, [name for name, module in model.named_modules() if isinstance(module, (QLinear, QEmbedding))])
        tensors, words, keys = as_compressed_tensors(model)
        model.config.quantization_config = words
        if hasattr(model.config, "tie_word_embeddings"):
            model.config.tie_word_embeddings = keys.get("tie_word_embeddings", False)
        # Positions that a class computes are not stored, but for their codes.
        left_out = getattr(model, "_keys_to_ignore_on_save", None)
        if left_out and any(f"{key}_scale" in tensors for key in left_out):
            model._keys_to_ignore_on_save = [key for key in left_out if f"{key}_scale" not in tensors]
        return tensors, {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        return dequantize_(model) if has_codes(model) else super()._dequantize(model, dtype)  # type: ignore[misc]

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # gradients pass through to adapters

    @property
    def is_qat_trainable(self) -> bool:
        return False  # codes are not trained: prepare_qat_ takes a model in floating point

    @property
    def is_compileable(self) -> bool:
        return True
