"""pyquant in SGLang: its W8A8 layers of compressed-tensors checkpoints by QLinears. docs/sglang.md is the guide.

SGLang finds register() by the entry point `pyquant` of the group `sglang.srt.plugins` and calls it in each of its
processes. Nothing here imports sglang before that.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Final

from pyquant.errors import ArgumentError

__all__ = ["register"]

VARIABLE: Final = "PYQUANT_SGLANG"
PLACES: Final = ("off", "prefer")
# The class of SGLang whose methods are replaced, by its place.
SCHEME: Final = (
    "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8"
)


def register() -> None:
    """Hook pyquant's products into SGLang's W8A8 layers. SGLang calls this itself.

    SGLang has no list of kernels to choose from, only hooks that replace what it does. The environment variable
    PYQUANT_SGLANG says whether they do: 'off' (the default: nothing is changed) or 'prefer'.
    A second call changes nothing. Without sglang, nothing happens.
    Raises ArgumentError for another value of PYQUANT_SGLANG, ImportError for an SGLang without that hook registry.

    Example:
        >>> register()  # nothing: PYQUANT_SGLANG is not set
    """
    place = os.environ.get(VARIABLE, "") or PLACES[0]
    if place not in PLACES:
        raise ArgumentError(VARIABLE, repr(place), ", ".join(PLACES))
    if place == "off" or importlib.util.find_spec("sglang") is None:
        return
    from pyquant.integrations.sglang import hooks

    hooks.register(SCHEME)
