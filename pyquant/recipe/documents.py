"""YAML, TOML and JSON to plain data and back, bounded: the one reader of documents written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import strict_json
from pyquant.io.atomic import read_file
from pyquant.recipe import toml_document, yaml_document
from pyquant.recipe.plain import Refused, check_plain

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = strict_json.MAX_DEPTH
FORMATS: Final = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def format_of(path: Path, argument: str = "recipe") -> str:
    """The format by a file's ending. Raises ArgumentError for another ending."""
    if path.suffix.lower() not in FORMATS:
        raise ArgumentError(argument, f"{path}: ending {path.suffix!r}"[:240], ", ".join(FORMATS))
    return FORMATS[path.suffix.lower()]


def read(path: Path, argument: str = "recipe") -> dict[str, Any]:
    """Plain data of a file. Raises ArgumentError for `argument` naming the file and what is wrong with it."""
    form = format_of(path, argument)

    def check(size: int) -> None:
        if size > MAX_BYTES:
            raise ArgumentError(argument, f"{path}: {size} bytes", f"at most {MAX_BYTES} bytes")

    try:
        data = read_file(path, check=check)
    except CheckpointError:  # a pipe, a directory, a device
        raise ArgumentError(argument, f"{path}: not a regular file", "a regular file") from None
    except FileNotFoundError:
        raise ArgumentError(argument, f"{path}: no such file", "a file that can be read") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(argument, f"{str(path)!r}: {reason}"[:240], "a file that can be read") from None
    try:
        return parse(data.decode("utf-8"), form, str(path), argument)
    except UnicodeDecodeError as error:
        raise ArgumentError(argument, f"{path}: byte {error.start} is not UTF-8", "UTF-8") from None


def parse(text: str, format: str, where: str, argument: str = "recipe") -> dict[str, Any]:
    """Plain data of a document. Raises ArgumentError naming `where` and what is wrong; builds nothing but plain
    data.

    Bounds hold for every format: 1 MiB (YAML half of it, TOML an eighth), 8 levels, 2^16 values, integers of 64
    bits, numbers of 32 characters, every key once. No text of that size takes more than a second or 100 MB
    (tests/hostile/test_documents.py measures it)."""
    if not isinstance(text, str):
        raise ArgumentError(argument, f"{where}: a {type(text).__name__}", "text")
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise ArgumentError(argument, f"{where}: {size} bytes", f"at most {MAX_BYTES} bytes")
    readers = {"yaml": yaml_document.parse, "toml": toml_document.parse, "json": _parse_json}
    if not isinstance(format, str) or format not in readers:
        raise ArgumentError(argument, f"{where}: format {format!r}"[:240], ", ".join(readers))
    try:
        data = readers[format](text)
        if not isinstance(data, dict):
            raise Refused(f"a {type(data).__name__}", "a mapping at the top")
        check_plain(data)
    except Refused as error:
        raise ArgumentError(argument, f"{where}: {error.got}"[:240], error.allowed) from None
    return data


def _parse_json(text: str) -> Any:
    try:
        return strict_json.loads(text.encode("utf-8", "surrogatepass"), "")
    except CheckpointError as error:
        raise Refused(str(error).removeprefix(": "), "a JSON object") from None


def dump(data: Mapping[str, Any], format: str) -> str:
    """The text of plain data, keys in their order, nulls left out of TOML."""
    if format == "json":
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    if format == "yaml":
        text: str = yaml_document.library().safe_dump(dict(data), sort_keys=False, allow_unicode=False, width=110)
        return text
    if format == "toml":
        return _toml_text(data)
    raise ArgumentError("format", repr(format), "yaml, toml, json")


_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def _toml_text(data: Mapping[str, Any]) -> str:
    """Scalars first, then a table for every mapping; deeper mappings inline. Enough for recipes, and no more."""
    lines = [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in data.items() if v is not None and not isinstance(v, dict)]
    for key, table in data.items():
        if isinstance(table, dict):
            lines += ["", f"[{_toml_key(key)}]"]
            lines += [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)  # a JSON text is a TOML text but for surrogate pairs
