"""YAML, TOML and JSON to plain data and back, bounded: small files, no deep nesting, no aliases, no repeated key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import strict_json
from pyquant.recipe.fields import refuse

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = strict_json.MAX_DEPTH
FORMATS: Final = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def format_of(path: Path) -> str:
    """The format that a file's name tells. Raises ArgumentError for another ending."""
    if path.suffix.lower() not in FORMATS:
        refuse(str(path), f"ending {path.suffix!r}", ", ".join(FORMATS))
    return FORMATS[path.suffix.lower()]


def parse(text: str, format: str, where: str) -> dict[str, Any]:
    """Plain data of a document. Raises ArgumentError naming `where` and what is wrong; builds nothing but plain data.

    Example:
        >>> parse('{"a": 1}', "json", "text")
        {'a': 1}
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        refuse(where, f"{len(text)} characters", f"at most {MAX_BYTES} bytes")
    readers = {"yaml": _parse_yaml, "toml": _parse_toml, "json": _parse_json}
    if format not in readers:
        refuse(where, f"format {format!r}", ", ".join(readers))
    data = readers[format](text, where)
    if not isinstance(data, dict):
        refuse(where, f"a {type(data).__name__}", "a mapping at the top")
    if strict_json.is_deeper_than(data, MAX_DEPTH):
        refuse(where, "nested too deeply", f"{MAX_DEPTH} levels")
    return data


def dump(data: Mapping[str, Any], format: str) -> str:
    """The text of plain data, keys in their order, nulls left out of TOML."""
    if format == "json":
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    if format == "yaml":
        text: str = _yaml("the recipe").safe_dump(dict(data), sort_keys=False, allow_unicode=False, width=110)
        return text
    if format == "toml":
        return _toml_text(data)
    raise ArgumentError("format", repr(format), "yaml, toml, json")


def _yaml(where: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ArgumentError(
            "recipe",
            f"{where}: YAML, and PyYAML is not installed",
            "pip install pyyaml (or 'pyquant-gemm[cli]'); TOML; JSON",
        ) from None
    return yaml


def _parse_yaml(text: str, where: str) -> Any:
    yaml = _yaml(where)
    try:
        _check_events(yaml, text, where)
        _check_repeated(yaml, yaml.compose(text, Loader=yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or number that is none
        if isinstance(error, ArgumentError):
            raise
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" (line {mark.line + 1})"
        refuse(where, " ".join(str(getattr(error, "problem", None) or error).split()) + line, "valid YAML")


def _check_events(yaml: Any, text: str, where: str) -> None:
    """Depth and aliases, from the stream of events: nothing is built yet."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if getattr(event, "anchor", None):  # of an anchor, and of an alias
            refuse(where, f"an anchor or alias in line {event.start_mark.line + 1}", "values written out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            refuse(where, f"nested too deeply in line {event.start_mark.line + 1}", f"{MAX_DEPTH} levels")


def _check_repeated(yaml: Any, node: Any, where: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                refuse(where, f"key {key.value!r} is repeated in line {key.start_mark.line + 1}", "every key once")
            seen.add(str(key.value))
            _check_repeated(yaml, value, where)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_repeated(yaml, value, where)


def _parse_json(text: str, where: str) -> Any:
    try:
        return strict_json.loads(text.encode("utf-8", "surrogatepass"), where)
    except CheckpointError as error:
        refuse(where, str(error).removeprefix(f"{where}: "), "a JSON object")


def _parse_toml(text: str, where: str) -> Any:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError:
            raise ArgumentError(
                "recipe", f"{where}: TOML needs Python 3.11", "pip install tomli, or a YAML or JSON file"
            ) from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        refuse(where, str(error)[:160], "valid TOML")


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
