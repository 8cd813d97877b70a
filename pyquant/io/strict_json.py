"""JSON as our files allow it: ASCII, bounded, no repeated key, no NaN, one way to write each document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from pyquant.errors import CheckpointError

MAX_BYTES: Final = 16 * 2**20
MAX_DEPTH: Final = 8
MAX_INTEGER: Final = 2**63 - 1
MAX_DIGITS: Final = 32
# What a parsed document may consist of. Three bytes of text can become an object of 64 and more, so without these a
# file would take thirty times its size; the largest manifest that fits into MAX_BYTES stays below both.
MAX_CONTAINERS: Final = 2**18
MAX_KEYS: Final = 2**19
# Columns of a line of compact(), of an entry of a list there, and of what shares a line of a longer list.
LINE: Final = 120
ROW: Final = 4096
SHORT: Final = 32


def loads(data: bytes, file: str) -> dict[str, Any]:
    """Parses a JSON object from untrusted bytes, which must keep to the limits above; `file` names them in messages.

    ASCII, integers within 64 bits, finite numbers, no repeated key. Raises CheckpointError naming the file, what was
    found and what is allowed; nothing else.
    """
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{file}: {len(data)} bytes; allowed: at most {MAX_BYTES}")
    # brackets and colons inside of texts are counted too: the bound is on the safe side, and costs nothing
    for signs, limit, what in ((b"[{", MAX_CONTAINERS, "lists and objects"), (b":", MAX_KEYS, "keys")):
        count = sum(data.count(sign) for sign in (signs[i : i + 1] for i in range(len(signs))))
        if count > limit:
            raise CheckpointError(f"{file}: {count} {what}; allowed: at most {limit}")
    try:
        document = json.loads(
            data.decode("ascii"),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: byte {error.start} is not ASCII; allowed: ASCII JSON") from None
    except RecursionError:
        raise CheckpointError(f"{file}: nested too deeply; allowed: {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not the JSON it should be: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: a {type(document).__name__}; allowed: an object")
    if is_deeper_than(document, MAX_DEPTH):
        raise CheckpointError(f"{file}: nested too deeply; allowed: {MAX_DEPTH} levels")
    return document


def ascii_of(text: str) -> bytes:
    """Text of JSON that other programs wrote, with every character beyond ASCII escaped, as loads takes it."""
    return (
        text.encode() if text.isascii() else "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text).encode()
    )


def pretty(document: Mapping[str, Any]) -> bytes:
    """The bytes of config.json and of the index: sorted keys, two spaces, a final newline, ASCII.

    Raises ValueError for NaN or infinity, TypeError for what JSON cannot hold.
    """
    return (json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")


def compact(document: Mapping[str, Any]) -> bytes:
    """The bytes of a file of results: one row or point a line, keys as they come, a final newline, ASCII.

    What fits into 120 columns stays on one line. So does each entry of a list up to 4096 columns, however wide: tables
    read and differ row by row. Long lists of numbers and short texts fill their lines.
    Raises ValueError for NaN or infinity, TypeError for what JSON cannot hold.

    Example:
        >>> rows = [{"k": 384, "candidate": "a" * 40}, {"k": 768, "candidate": "b" * 40}]
        >>> print(compact({"unit": "us", "rows": rows}).decode(), end="")
        {
         "unit": "us",
         "rows": [
          {"k": 384, "candidate": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
          {"k": 768, "candidate": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}
         ]
        }
    """
    return (_wrapped(document, 0, 0, LINE) + "\n").encode("ascii")


def lines(document: Mapping[str, Mapping[str, Any] | object]) -> bytes:
    """The bytes of a manifest: sorted keys, no spaces, one line for each key of the two outer levels.

    Raises ValueError for NaN or infinity, TypeError for what JSON cannot hold.

    Example:
        >>> print(lines({"b": 1, "a": {"y": [1, 2], "x": {}}}).decode(), end="")
        {"a":{
        "x":{},
        "y":[1,2]},
        "b":1}
    """
    return ("{" + ",\n".join(f"{_flat(k)}:{_second(document[k])}" for k in sorted(document)) + "}\n").encode("ascii")


def is_deeper_than(value: object, levels: int) -> bool:
    """Whether objects and arrays are nested more than `levels` deep."""
    if not isinstance(value, (dict, list)):
        return False
    if levels == 0:
        return True
    return any(is_deeper_than(v, levels - 1) for v in (value.values() if isinstance(value, dict) else value))


def _second(value: object) -> str:
    if not isinstance(value, Mapping) or not value:
        return _flat(value)
    return "{\n" + ",\n".join(f"{_flat(k)}:{_flat(value[k])}" for k in sorted(value)) + "}"


# made once: json.dumps with options makes an encoder each time, and a manifest has hundreds of lines
_flat: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def _wrapped(value: object, depth: int, column: int, width: int) -> str:
    """A value that begins at a column, on one line where it fits into the width (and a comma), else an entry a line."""
    line = json.dumps(value, allow_nan=False)
    if column + len(line) < width or not isinstance(value, (Mapping, list)) or not value:
        return line
    start = "\n" + " " * (depth + 1)
    if isinstance(value, Mapping):
        named = [(json.dumps(key) + ": ", entry) for key, entry in value.items()]
        entries = [name + _wrapped(entry, depth + 1, depth + 1 + len(name), LINE) for name, entry in named]
    elif not any(isinstance(entry, (Mapping, list)) for entry in value):
        entries = _filled([json.dumps(entry) for entry in value], LINE - depth - 1)
    else:
        entries = [_wrapped(entry, depth + 1, depth + 1, ROW) for entry in value]
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    return opening + start + ("," + start).join(entries) + "\n" + " " * depth + closing


def _filled(texts: list[str], width: int) -> list[str]:
    """Short texts put together to lines of at most a width, with room for a comma; a long one stays alone."""
    lines = texts[:1]
    for text in texts[1:]:
        if max(len(text), len(lines[-1].rsplit(", ", 1)[-1])) <= SHORT and len(lines[-1]) + len(text) + 2 < width:
            lines[-1] += ", " + text
        else:
            lines.append(text)
    return lines


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        repeated = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated[:80]!r} is repeated")
    return entries


def _integer(text: str) -> int:
    # the length comes first: int() of a megabyte of digits would take long
    if len(text) > MAX_DIGITS or abs(int(text)) > MAX_INTEGER:
        raise ValueError(f"integer {text[:MAX_DIGITS]} exceeds 64 bits")
    return int(text)


def _number(text: str) -> float:
    value = float(text) if len(text) <= MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"number {text[:MAX_DIGITS]} is not a finite float of at most {MAX_DIGITS} characters")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")
