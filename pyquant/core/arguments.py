"""Checks of arguments that are no tensors: each gives the value back, or raises ArgumentError naming the argument."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from pyquant.core.names import did_you_mean
from pyquant.errors import ArgumentError

_PLAIN = (type(None), bool, int, float, str, bytes)


def shown(value: object) -> str:
    """What an argument was, in one short line: its type, and its value where that is short."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "an integer beyond 64 bits"
    short = isinstance(value, (tuple, list)) and len(value) <= 4 and all(isinstance(v, _PLAIN) for v in value)
    if short or isinstance(value, _PLAIN):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:76]} ..."
    return f"a class ({value.__name__})" if isinstance(value, type) else f"a value of type {type(value).__name__}"


def module(argument: str, value: object) -> nn.Module:
    """A module."""
    if not isinstance(value, nn.Module):
        raise ArgumentError(argument, shown(value), "a torch.nn.Module")
    return value


def function(argument: str, value: Any, form: str, *, optional: bool = True) -> Any:
    """Something that can be called, or None where that is allowed; `form` says with what."""
    if (value is None and optional) or callable(value):
        return value
    raise ArgumentError(argument, shown(value), f"a function {form}{', or None' if optional else ''}")


def filter_function(value: Any) -> Any:
    """The filter_fn of everything that walks through a model."""
    return function("filter_fn", value, "(module, name) -> bool")


def iterable(argument: str, value: Any, what: str = "batches") -> Iterable[Any]:
    """Something that can be gone through. For batches a single tensor or mapping is refused: its rows or keys would
    pass as batches."""
    # not iter(value): a DataLoader would start its workers; text would be gone through letter by letter
    goes = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if what == "batches" and isinstance(value, (Tensor, Mapping)):
        kind = f"one tensor {list(value.shape)}" if isinstance(value, Tensor) else "one mapping"
        raise ArgumentError(argument, kind, "an iterable of batches: [batch] for a single one, batch.split(n) for rows")
    if not goes or isinstance(value, (str, bytes, type)):
        raise ArgumentError(argument, shown(value), f"an iterable of {what}")
    return cast("Iterable[Any]", value)


def x_or_input(x: Any, input: Any) -> Any:
    """What a layer is called with: x, or `input`, which is its name in torch's layers. Raises ArgumentError for both;
    the layer itself refuses None."""
    if x is not None and input is not None:
        raise ArgumentError("x", "given, and input as well", "a tensor, as x or as input")
    return input if x is None else x


def text(argument: str, value: object) -> str:
    """Text."""
    if not isinstance(value, str):
        raise ArgumentError(argument, shown(value), "text")
    return value


def flag(argument: str, value: object) -> bool:
    """True or False, and nothing else that has a truth."""
    if not isinstance(value, bool):
        raise ArgumentError(argument, shown(value), "True or False")
    return value


def whole(argument: str, value: object, low: int, high: int = sys.maxsize) -> int:
    """An integer from low to high; no bool."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        allowed = f"a whole number >= {low}" if high == sys.maxsize else f"a whole number from {low} to {high}"
        raise ArgumentError(argument, shown(value), allowed)
    return value


def number(
    argument: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    infinite: bool = False,
) -> float:
    """A finite number of at least `low`, or above it, and at most `high`, no bool; `infinite` allows infinity."""
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)):
            real = float(value)
            may_be = math.isfinite(real) or (infinite and real == math.inf)
            if may_be and low <= real <= high and (real > low or not above):
                return real
    except OverflowError:
        pass
    if high < math.inf:
        raise ArgumentError(argument, shown(value), f"a number in {'(' if above else '['}{low:g}, {high:g}]")
    limit = "" if low == -math.inf else f" above {low:g}" if above else f" >= {low:g}"
    raise ArgumentError(argument, shown(value), f"a {'' if infinite else 'finite '}number{limit}")


def mapping(argument: str, value: object, what: str) -> Mapping[Any, Any]:
    """A mapping; `what` says of what."""
    if not isinstance(value, Mapping):
        raise ArgumentError(argument, shown(value), f"a mapping of {what}")
    return value


def one_of(argument: str, value: Any, allowed: Iterable[Any], also: str = "") -> Any:
    """One of the names that are allowed; `also` describes what else is."""
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        hint = did_you_mean(value, map(str, names)) if isinstance(value, str) else ""
        raise ArgumentError(argument, shown(value), ", ".join(map(repr, names)) + also + hint)
    return value
