"""Strict reading of plain data into frozen records: a field carries its own check, an unknown key is an error."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from typing import Any, Final, NoReturn, TypeVar

from pyquant.core.names import did_you_mean
from pyquant.errors import ArgumentError

MAX_NUMBER: Final = sys.float_info.max
Check = Callable[[object, str], Any]
Record = TypeVar("Record")


def refuse(where: str, got: object, allowed: str) -> NoReturn:
    """Raise the error of a recipe: the key, what stood there, what may stand there."""
    raise ArgumentError("recipe", f"{where}: {got}"[:240], allowed)


def shown(value: object) -> str:
    """repr for messages: bounded, and of integers whose digits Python refuses to print."""
    if isinstance(value, int) and abs(value) >= 2**512:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)[:200]
    except Exception:  # a value whose own repr fails is not a reason to hide what is wrong with the document
        return f"a {type(value).__name__}"


def checked(default: Any, check: Check) -> Any:
    """A dataclass field with a default and the check that reads its value."""
    return field(default=default, metadata={"check": check})


def read(record: type[Record], data: object, where: str) -> Record:
    """The record (a dataclass of checked fields) in plain data. ArgumentError naming the key that is unknown or
    wrong."""
    known = {f.name: f.metadata["check"] for f in fields(record)}  # type: ignore[arg-type]
    entries = mapping(data, where)
    check_keys(entries, known, where)
    return record(**{key: known[key](value, f"{where}.{key}") for key, value in entries.items()})


def written(record: Any) -> dict[str, Any]:
    """The plain data of a record of plain values, every field."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def check_keys(data: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise ArgumentError naming a key that is not one of the known ones, and the one that was perhaps meant."""
    known = list(known)
    for key in data:
        if key not in known:
            refuse(where, f"unknown key {key[:80]!r}", ", ".join(known) + did_you_mean(key, known))


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """A mapping with text keys."""
    if not isinstance(value, Mapping):
        refuse(where, f"{type(value).__name__} {shown(value)}", "a mapping")
    for key in value:
        if not isinstance(key, str):
            refuse(where, f"key {shown(key)}", "text as keys")
    return value


def accepting(accepts: Callable[[Any], bool], allowed: str) -> Check:
    """A check that gives back what it accepts."""

    def check(value: object, where: str) -> Any:
        return value if accepts(value) else refuse(where, shown(value), allowed)

    return check


flag: Final = accepting(lambda value: isinstance(value, bool), "true or false")
text: Final = accepting(lambda value: isinstance(value, str) and value.isprintable(), "text on one line")


def integer(low: int) -> Check:
    """A whole number of at least `low`."""
    return accepting(lambda value: type(value) is int and low <= value < 2**31, f"a whole number of at least {low}")


def number(low: float, high: float = math.inf, *, above: bool = False) -> Check:
    """A finite number in [low, high]; above=True: in (low, high]."""

    def check(value: object, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_NUMBER:
            refuse(where, shown(value), "a number")
        if not low <= value <= high or (above and value == low):
            upper = "" if high == math.inf else f" and at most {high:g}"
            refuse(where, shown(value), f"a number {'above' if above else 'of at least'} {low:g}{upper}")
        return float(value)

    return check


def choice(*allowed: str | Callable[[], Iterable[str]]) -> Check:
    """One of some words; those of a function are what it gives when a value is checked, so that a registry can grow.
    YAML reads a bare `off` as false, so false is taken for it."""

    def check(value: object, where: str) -> str:
        words = [word for one in allowed for word in ([one] if isinstance(one, str) else one())]
        if value is False and "off" in words:
            return "off"
        if not isinstance(value, str) or value not in words:
            refuse(where, shown(value), ", ".join(words))
        return value

    return check


def optional(inner: Check) -> Check:
    """Nothing, or what the inner check allows."""
    return lambda value, where: None if value is None else inner(value, where)


def listed(inner: Check) -> Check:
    """A list, read into a tuple."""

    def check(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            refuse(where, f"{type(value).__name__} {shown(value)}", "a list")
        return tuple(inner(item, f"{where}[{i}]") for i, item in enumerate(value))

    return check
