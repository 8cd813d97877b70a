"""What the configurations share by which other libraries quantise a model while they load it.

Nothing here imports such a library.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from pyquant.core import arguments
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.nn.convert import Prepare
from pyquant.nn.fates import Fate
from pyquant.ptq.quantize import quantize_
from pyquant.ptq.run import quantize_recipe_, recipe_of
from pyquant.ptq.selective import SelectiveQuantizer
from pyquant.recipe import Recipe, is_recipe

METHOD: Final = "pyquant"
_OPTIONS: Final = ("embeddings", "heads", "on_indivisible", "filter_fn", "check_speed")


class OnTheFly:
    """What quantize_ is called with once a model is loaded. Raises ArgumentError for options that need data."""

    def __init__(self, config: Any = "W8A8Dynamic", **options: Any) -> None:
        for name in options:
            if name not in _OPTIONS:
                raise ArgumentError("options", name, ", ".join(_OPTIONS))
        self.quant_method: Any = METHOD
        self.config, self.options = config, options

    def to_dict(self) -> dict[str, Any]:
        """Words for the model's configuration in memory."""
        options = {name: _shown(value) for name, value in self.options.items()}
        return {"quant_method": METHOD, "config": _shown(self.config), **options}

    def quantise(self, model: nn.Module) -> None:
        """Quantise a loaded model in place."""
        quantize_(model, self.config, **self.options)


def recipe_in(config: Any) -> Recipe | None:
    """The recipe that a config is, or the path of; None: it is something else."""
    return recipe_of(config) if is_recipe(config) else None


def fates_by_recipe(model: nn.Module, recipe: Recipe) -> list[Fate]:
    """What a recipe makes of every layer of a model, which may be on the meta device. Raises PyquantError."""
    return SelectiveQuantizer.from_recipe(recipe).fates(model)


def quantise_by_recipe(model: nn.Module, recipe: Recipe, prepare: Prepare, **options: Any) -> None:
    """quantize_recipe_ in place; prepare makes the layers whose numbers are still in files."""
    quantize_recipe_(model, recipe, prepare=prepare, **options)


def refuse_offload(devices: object) -> None:
    """Raise UnsupportedError for a device map that keeps weights where they are not used: it has those of the files
    loaded, which codes are made of or unpacked from."""
    used = {str(device) for device in (devices if isinstance(devices, dict) else {}).values()}
    if "disk" in used or ("cpu" in used and len(used) > 1):
        raise UnsupportedError(
            f"device_map places layers on {', '.join(sorted(used))}: quantised layers cannot be offloaded while they "
            "are loaded; allowed: the CPU alone, or GPUs alone; accelerate.dispatch_model offloads the loaded model"
        )


def _shown(value: object) -> object:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, QScheme):
        return value.to_dict()
    return arguments.shown(value)
