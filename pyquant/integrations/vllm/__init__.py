"""pyquant in vLLM: kernels for its quantised layers, and a quantisation method `pyquant`. docs/vllm.md is the guide.

vLLM finds register() by the entry point `pyquant` of the group `vllm.general_plugins` and calls it in each of its
processes. Nothing here imports vllm before that.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, Final

from pyquant.errors import ArgumentError

__all__ = ["register"]

# What imports vLLM, by the module of this package that has it: looked up when it is asked for.
_LAZY: Final = {
    "PyquantConfig": "config",
    "ServedLayer": "report",
    "WorkerExtension": "report",
    "serving_report": "report",
}

VARIABLE: Final = "PYQUANT_VLLM"
PLACES: Final = ("last", "prefer", "off")


def register() -> None:
    """Offer pyquant's kernels to vLLM, and the quantisation method `pyquant`. vLLM calls this itself.

    The environment variable PYQUANT_VLLM says where the kernels stand in vLLM's lists, of which it takes the first that
    can serve a layer: 'last' (the default: where none of its own can), 'prefer' (first), 'off' (nothing is registered).
    What was done is logged. A second call changes nothing. Without vllm, nothing happens.
    Raises ArgumentError for another value of PYQUANT_VLLM, ImportError for a vLLM without those lists.

    Example:
        >>> register()  # doctest: +SKIP
    """
    place = os.environ.get(VARIABLE, "") or PLACES[0]
    if place not in PLACES:
        raise ArgumentError(VARIABLE, repr(place), ", ".join(PLACES))
    if place == "off" or importlib.util.find_spec("vllm") is None:
        return
    from pyquant.integrations.vllm import tables

    tables.register(first=place == "prefer")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
