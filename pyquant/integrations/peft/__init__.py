"""pyquant in PEFT: LoRA adapters around quantised layers, trained, saved, loaded and merged.

Nothing here imports peft before enable(), register() or PyquantLoraLinear is asked for. docs/peft.md is the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyquant.integrations.peft.merging import MergeError, merge_errors

if TYPE_CHECKING:
    from pyquant.integrations.peft.layer import PyquantLoraLinear

__all__ = ["MergeError", "PyquantLoraLinear", "disable", "enable", "merge_errors", "register"]


def enable() -> None:
    """Let peft put LoRA adapters around QLinears, wherever it makes one for a Linear.

    Afterwards, until disable(): `get_peft_model`, `PeftModel.from_pretrained`, `load_adapter`,
    `inject_adapter_in_model` and `add_adapter` of transformers take models with quantised layers;
    target_modules="all-linear" means QLinears too; and modules_to_save refuses quantised layers, whose codes cannot be
    trained. A second call changes nothing.
    Raises ImportError where peft is not installed.

    Example:
        >>> from pyquant.integrations import peft as pyquant_peft
        >>> pyquant_peft.enable()  # doctest: +SKIP
    """
    from pyquant.integrations.peft import switch

    switch.enable()


def disable() -> None:
    """Take enable() back; adapters that were made in between stay as they are, and work."""
    from pyquant.integrations.peft import switch

    switch.disable()


def register(config: Any) -> Any:
    """Let one LoraConfig put adapters around QLinears, without enable(). -> the configuration.

    config  peft.LoraConfig with target_modules by name. What a saved adapter needs, too, because a registration is not
            saved: `PeftModel.from_pretrained(model, path, config=register(LoraConfig.from_pretrained(path)))`.
    Raises ArgumentError for another object, and for "all-linear", which only enable() can widen to QLinears.

    Example:
        >>> from peft import LoraConfig  # doctest: +SKIP
        >>> config = register(LoraConfig(target_modules=["q_proj", "v_proj"]))  # doctest: +SKIP
    """
    from pyquant.integrations.peft import switch

    return switch.register(config)


def __getattr__(name: str) -> Any:
    if name == "PyquantLoraLinear":
        from pyquant.integrations.peft.layer import PyquantLoraLinear

        return PyquantLoraLinear
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
