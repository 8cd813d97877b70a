"""pyquant in transformers: checkpoints that run in integers, models quantised while they load, files that go with them.

Nothing here imports transformers before enable() or PyquantConfig is asked for. docs/transformers.md is the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyquant.integrations.transformers.model import (
    config_of,
    copy_companions,
    example_of,
    forget_quantization,
    generation_files,
    has_untied,
    head_prefix,
    ignored_names,
    is_model,
    refill_buffers,
    unreadable_layers,
)
from pyquant.integrations.transformers.text import text_batches

if TYPE_CHECKING:
    from pyquant.integrations.transformers.on_the_fly import PyquantConfig

__all__ = [
    "PyquantConfig",
    "config_of",
    "copy_companions",
    "disable",
    "enable",
    "example_of",
    "forget_quantization",
    "generation_files",
    "has_untied",
    "head_prefix",
    "ignored_names",
    "is_model",
    "keep_types",
    "layer_names_in_files",
    "makers_of",
    "refill_buffers",
    "rows_in_files",
    "text_batches",
    "unreadable_layers",
]


def enable() -> None:
    """Let transformers run compressed-tensors checkpoints in integers, and save models that pyquant quantised.

    Afterwards, until disable():
    - `from_pretrained` of a directory with int8 or int4 codes (`quant_method` compressed-tensors, of pyquant or of
      other tools) gives a model of QLinears, equal to the bit to load_pretrained or load_quantized_. Floating-point
      codes (FP8), uncompressed files and `dequantize=True` are left to transformers.
    - `save_pretrained` of a model with QLinears writes such a directory instead of refusing.
    A second call changes nothing. Raises ImportError where transformers (5.x) is not installed.

    Example:
        >>> from pyquant.integrations import transformers as pyquant_transformers
        >>> pyquant_transformers.enable()  # doctest: +SKIP
    """
    from pyquant.integrations.transformers import switch

    switch.enable()


def disable() -> None:
    """Take enable() back; models that were loaded in between stay as they are, and can still be saved."""
    from pyquant.integrations.transformers import switch

    switch.disable()


def makers_of(model: Any, names: Any, mapping: Any = None) -> Any:
    """conversions.makers_of: how transformers makes the tensors of a model of those in its files."""
    from pyquant.integrations.transformers import conversions

    return conversions.makers_of(model, names, mapping)


def layer_names_in_files(model: Any, layers: Any) -> Any:
    """conversions.layer_names_in_files: layers that have another name in files than in the model."""
    from pyquant.integrations.transformers import conversions

    return conversions.layer_names_in_files(model, layers)


def rows_in_files(model: Any, parameter: str, experts: int, rows: int) -> Any:
    """conversions.rows_in_files: how files hold a parameter that has a matrix an expert."""
    from pyquant.integrations.transformers import conversions

    return conversions.rows_in_files(model, parameter, experts, rows)


def keep_types(model: Any, dtype: Any) -> None:
    """conversions.keep_types: float32 for the parameters that from_pretrained leaves in it."""
    from pyquant.integrations.transformers import conversions

    conversions.keep_types(model, dtype)


def __getattr__(name: str) -> Any:
    if name == "PyquantConfig":
        from pyquant.integrations.transformers.on_the_fly import PyquantConfig

        return PyquantConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
