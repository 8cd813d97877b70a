"""Named recipes: for kinds of models and bit widths, the one that the measured tables speak for (docs/recipes.md)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from pyquant.core import arguments
from pyquant.core.names import did_you_mean
from pyquant.errors import ArgumentError
from pyquant.recipe.recipe import Recipe

_RECIPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llm-w8a8": {"default": "W8A8Dynamic"},
    "llm-w8a16": {"default": "W8A16"},
    "llm-w4a16": {"default": "W4A16", "improve": ["gptq"]},
    "llm-w4a8": {"default": "W4A8Dynamic", "improve": ["gptq"]},
    "llm-w4a4": {
        "default": {"scheme": "W4A4Dynamic", "group_size": 128, "symmetric_inputs": False},
        "improve": ["rotate_online", "gptq"],
    },
    "encoder-w8a8": {"default": "W8A8Dynamic"},
    "encoder-w4a8": {"default": {"scheme": "W4A8Dynamic", "group_size": 32}, "improve": ["gptq"]},
    "vision-w8a8": {"default": "W8A8Dynamic"},
    "vision-w4a8": {"default": {"scheme": "W4A8Dynamic", "group_size": 32}},
    "cnn-w4a8": {"default": {"scheme": "W4A8Dynamic", "group_size": None}, "improve": ["gptq"]},
}
NAMES: Final = tuple(_RECIPES)


def recommended(name: str, *, num_batches: int = 16) -> Recipe:
    """The recommended recipe of that name; `quantize_(model, recommended(name), data=batches)` follows it.

    name  'llm-w4a8': the kind of model and the bits of weights and inputs. docs/recipes.md says which is for what, and
          what each costs. Those with improvers need data.
    num_batches   of the data, at least 1; improvers keep a quarter of them to judge by.
    ->    a Recipe; `dumps()` is the text of its file, to be changed.
    Raises ArgumentError naming all of them.

    Example:
        >>> recommended("llm-w4a8").improve
        ('gptq',)
    """
    if not isinstance(name, str) or name not in _RECIPES:
        hint = did_you_mean(name, NAMES) if isinstance(name, str) else ""
        raise ArgumentError("name", repr(name)[:120], ", ".join(NAMES) + hint)
    count = arguments.whole("num_batches", num_batches, 1)
    # output heads stay as they are, as quantize_(heads=False) leaves them
    shared = {"heads": False, "calib_params": {"num_calib_batches": count}}
    return Recipe.from_dict({**shared, **copy.deepcopy(dict(_RECIPES[name]))}, name)
