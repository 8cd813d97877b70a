"""No silent fallback: a slower path with the same bits is announced once, or refused on request."""

from __future__ import annotations

import warnings

from pyquant.core import arguments
from pyquant.errors import UnsupportedError

_strict = False
_announced: set[str] = set()


def set_strict(enabled: bool) -> None:
    """Refuse slower paths instead of announcing them (off at start).

    enabled  True: an op that would run in plain PyTorch because no compiled kernel serves it raises UnsupportedError.

    Example:
        >>> set_strict(True); set_strict(False)
    """
    global _strict
    _strict = arguments.flag("enabled", enabled)


def slower_path(what: str, why: str) -> None:
    """Called by every path that is right but slow: warns once for each reason, raises UnsupportedError when strict."""
    if _strict:
        raise UnsupportedError(f"{what}: {why} (set_strict is on)")
    if why not in _announced:
        _announced.add(why)
        warnings.warn(f"pyquant: {what}: {why}; results are the same, slowly", RuntimeWarning, stacklevel=4)
