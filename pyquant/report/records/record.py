"""@record: a frozen dataclass that goes to a JSON file and comes back equal; one table of all kinds."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pyquant.core.paths import file_path
from pyquant.errors import CheckpointError
from pyquant.io import strict_json
from pyquant.io.atomic import read_file, write_file
from pyquant.report.records.environment import FAKED

T = TypeVar("T")
KINDS: Final[dict[str, tuple[type, int]]] = {}
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
Upgrades = Mapping[int, Upgrade]
_UPGRADES: Final[dict[str, Upgrades]] = {}
_FORMER: Final[dict[str, tuple[str, Upgrade]]] = {}  # name of a class or kind in older files -> its kind now
_WORDS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def record(
    kind: str, version: int = 1, upgrades: Upgrades | None = None, former: Mapping[str, Upgrade] | None = None
) -> Callable[[type[T]], type[T]]:
    """Give a frozen dataclass a kind and a version in files.

    upgrades  {older version: function from its plain data to that of the next}; older files stay readable.
    former    {older kind, or class name that stood in files before kinds: function to this version's plain data}.
    Properties that a class names in DERIVED (a ClassVar) are written for other readers, and left out when it is read.
    Fields may be str, bool, int, float, None, other dataclasses, and lists, tuples and dicts (keys str) of those.

    Example:
        >>> from dataclasses import dataclass
        >>> @record("example-of-a-record")
        ... @dataclass(frozen=True)
        ... class Example:
        ...     value: float
        >>> from_plain(to_plain(Example(0.5)))
        Example(value=0.5)
    """

    def register(cls: type[T]) -> type[T]:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__name__} is not a dataclass")
        if kind in KINDS and KINDS[kind][0].__qualname__ != cls.__qualname__:
            raise TypeError(f"record kind {kind!r} is taken by {KINDS[kind][0].__qualname__}")
        KINDS[kind] = (cls, version)
        _UPGRADES[kind] = dict(upgrades or {})
        _FORMER.update({name: (kind, upgrade) for name, upgrade in (former or {}).items()})
        return cls

    return register


def to_plain(value: Any) -> dict[str, Any]:
    """A record as dictionaries and lists; numbers that JSON lacks become 'inf', '-inf', 'nan'. from_plain reads it."""
    kind = kind_of(value)
    if kind is None:
        raise TypeError(f"{type(value).__name__} is not a @record")
    return {"kind": kind, "version": KINDS[kind][1], **plain_of(value)}


def kind_of(value: Any) -> str | None:
    """The kind of a record; None for anything else."""
    return next((kind for kind, (cls, _) in KINDS.items() if type(value) is cls), None)


def from_plain(data: Mapping[str, Any], where: str = "record") -> Any:
    """The record in plain data. Raises CheckpointError naming the field that is missing, unknown or of another type."""
    import_kinds()
    entries = dict(data)
    kind, version = entries.pop("kind", None), entries.pop("version", None)
    if kind is None and "record" in entries:  # before records had kinds, the name of the class stood in their files
        name = entries.pop("record")
        kind = next((k for k, (cls, _) in KINDS.items() if cls.__name__ == name), name)
    if isinstance(kind, str) and kind in _FORMER and version == 1:
        kind, upgrade = _FORMER[kind]
        entries, version = upgrade(entries), KINDS[kind][1]
    if not isinstance(kind, str) or kind not in KINDS:
        found = "no record that pyquant saved" if kind is None else f"a record of kind {kind!r}"
        raise CheckpointError(f"{where}: {found}; allowed: {', '.join(sorted(KINDS))}")
    cls, newest = KINDS[kind]
    steps = _UPGRADES[kind]
    if type(version) is not int or (version != newest and version not in steps):
        allowed = ", ".join(map(str, [*sorted(steps), newest]))
        raise CheckpointError(f"{where}: version {version!r} of {kind}; allowed: {allowed}")
    for older in range(version, newest):
        entries = steps[older](entries)
    return _read(cls, entries, where)


@functools.cache
def import_kinds() -> None:
    """Import every module of this package, so that every kind of record is known; none of them needs torch."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)], "pyquant.report.records."):
        importlib.import_module(module.name)


def save_record(path: str | os.PathLike[str], value: Any) -> Path:
    """Write a record as JSON, whole or not at all. -> the path."""
    path = file_path("path", path)
    return write_file(path, strict_json.compact(to_plain(value)))


def load_record(path: str | os.PathLike[str], kind: type[T] | None = None, *, faked: bool = False) -> T:
    """The record in a file; of another class than `kind`: CheckpointError. So for a damaged or missing file, and for
    one whose times are faked, unless `faked` says that a dry run reads its own."""
    path = file_path("path", path)
    try:
        data = read_file(path, check=lambda size: None if size <= strict_json.MAX_BYTES else _too_large(path, size))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    value = from_plain(strict_json.loads(_ascii(data), str(path)), str(path))
    if kind is not None and not isinstance(value, kind):
        raise CheckpointError(f"{path}: a {type(value).__name__}; allowed: a {kind.__name__}")
    if _clock(value) == FAKED and not faked:
        raise CheckpointError(f"{path}: its times are faked, by a dry run; allowed: measurements")
    return typing.cast(T, value)


def _clock(value: Any) -> str:
    """The clock in the environment of a record, where it has one."""
    environment = getattr(value, "environment", None)
    found = environment.get("clock") if isinstance(environment, Mapping) else getattr(environment, "clock", "")
    return str(found or getattr(value, "clock", ""))


def _too_large(path: Path, size: int) -> None:
    raise CheckpointError(f"{path}: {size} bytes; allowed: at most {strict_json.MAX_BYTES}")


def _ascii(data: bytes) -> bytes:
    """UTF-8, which older files are, escaped as JSON does; anything else stays as it is, for the reader to refuse."""
    if data.isascii():
        return data
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data
    return "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text).encode("ascii")


def plain_of(value: Any) -> Any:
    """A dataclass as dictionaries and lists, with its derived properties and without kind and version."""
    if dataclasses.is_dataclass(value):
        names = [*(f.name for f in dataclasses.fields(value)), *_derived(type(value))]
        return {name: plain_of(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(k): plain_of(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_of(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return next(word for word, number in _WORDS.items() if number == value or number != number)
    return value


def _read(hint: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        rest = [a for a in args if a is not type(None)]
        for i, option in enumerate(rest):
            try:
                return _read(option, data, where)
            except CheckpointError:
                if i == len(rest) - 1:
                    raise
    if dataclasses.is_dataclass(hint):
        return _read_fields(hint, data, where)
    if origin in (list, tuple):
        if not isinstance(data, list):
            raise _wrong(where, data, "a list")
        if origin is tuple and args[-1] is not Ellipsis:
            if len(data) != len(args):
                raise _wrong(where, data, f"{len(args)} entries")
            return tuple(_read(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True)))
        return origin(_read(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(data, dict):
            raise _wrong(where, data, "an object")
        return {key: _read(args[1], v, f"{where}[{key!r}]") for key, v in data.items()}
    if hint is float:
        if isinstance(data, str) and data in _WORDS:
            return _WORDS[data]
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return float(data)
        raise _wrong(where, data, "a number")
    if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
        raise _wrong(where, data, f"{hint.__name__}")
    return data


def _read_fields(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, data, f"an object ({cls.__name__})")
    data = {name: value for name, value in data.items() if name not in _derived(cls)}
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise CheckpointError(f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(fields)}")
    missing = [
        n
        for n, f in fields.items()
        if n not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise CheckpointError(f"{where}: no field {missing[0]!r}; allowed: {', '.join(fields)}")
    return cls(**{name: _read(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _derived(cls: Any) -> tuple[str, ...]:
    return getattr(cls, "DERIVED", ())


def _wrong(where: str, data: Any, allowed: str) -> CheckpointError:
    return CheckpointError(f"{where}: {type(data).__name__} {data!r}"[:200] + f"; allowed: {allowed}")
