"""Every closed list of names, once: what schemes, files, recipes, ops and the command line accept and print.

Lists to which users add their own (calibrators, search algorithms, sensitivity metrics, objectives) are registries:
pyquant.core.registry.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

# csrc/core/problem.h and csrc/core/dtype.h number them in this order; tests/core/test_names.py compares.
ACTIVATIONS: Final = ("none", "relu", "clamp", "gelu", "gelu_tanh", "silu")

# per_token and per_channel are the same arithmetic (one scale per row of the last dimension); the two names say which
# operand is meant: activations [M, K] or weights [N, K].
GRANULARITIES: Final = ("per_tensor", "per_token", "per_channel", "per_group")

FLOAT_DTYPES: Final = ("float32", "float16", "bfloat16")  # of inputs, results and floating-point layers
HALF_DTYPES: Final = ("float16", "bfloat16")  # of layers whose weights have 16 bits

OUTPUT_METRICS: Final = ("kl", "sqnr", "mse", "cosine")  # label-free losses of a model's outputs
OPEN_CALIBRATOR: Final = "histogram"  # placeholder for the method that the calibration call, or the recipe, names
GIVEN_CALIBRATOR: Final = "fixed"  # takes the range that it is given, not one of data


def words(table: str) -> tuple[str, ...]:
    """The names of a long table, written as the words of one text."""
    return tuple(table.split())


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """The end of an error text about a misspelt name, such as '; did you mean "W8A8"?', or nothing if none is near."""
    near = difflib.get_close_matches(given[:80], names if isinstance(names, list) else list(names), 1)
    return f'; did you mean "{near[0]}"?' if near else ""


def listed(names: Sequence[str], most: int = 6, separator: str = ", ") -> str:
    """The first of some names in a text, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
