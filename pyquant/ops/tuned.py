"""Measured choices of kernels: the file that `pyquant tune` writes, and how it reaches the compiled plan.

A table is read twice, once from the package and once from the user's cache, whose choices win. Only the compiled plan
uses it; a damaged file is left out with a reason that `pyquant doctor` shows, because no result needs it: a choice of
kernels changes no bit of an integer layer, and of weight-only and 16-bit layers last bits within their bound.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch

from pyquant.errors import CheckpointError
from pyquant.io import strict_json
from pyquant.io.atomic import at_most, read_file

SCHEMA: Final = 1
MAX_BYTES: Final = 4 * 2**20  # 12 000 choices; it is read at import
FILE: Final = "tuned.json"
PACKAGED: Final = Path(__file__).resolve().parent / FILE
TWO_LEVEL: Final = " two-level"  # behind the type of weights that have steps
_TYPES: Final = ("s4", "s8", "u8", "s32", "f16", "bf16", "f32")
_LAYOUTS: Final = ("natural", "blocked128")
_HALVES: Final = ("f16", "bf16")
_INPUTS: Final = (*_HALVES, "weight only", *(f"{x} {how}" for x in ("s8", "s4") for how in ("dynamic", "static")))
_log = logging.getLogger("pyquant.tuned")
_remarks: list[str] = []
_layers: dict[tuple[str, tuple[object, ...]], LayerChoice] = {}  # of the table that is followed, by GPU and key
_edition = 0  # how many tables were handed over
_has_float_rows = False  # whether it puts a kernel of ours in the place of torch's float product somewhere


@dataclass(frozen=True)
class Choice:
    """The quickest row for one problem, and what the model would have taken.

    row  name in the kernel table, or 'torch' where torch's own float product was the quickest.
    zero_point, residual   whether it was measured with zero points of activations, with a residual; None, in older
    files: it holds for both.
    m    largest M of the bucket it holds for.   us  measured median.   model_us  measured median of model_row.
    """

    x: str
    w: str
    out: str
    x_packed: bool
    w_layout: str
    group_size: int
    n: int
    k: int
    m: int
    row: str
    us: float
    model_row: str
    model_us: float
    zero_point: bool | None = None
    residual: bool | None = None

    @property
    def problem(self) -> tuple[object, ...]:
        """What the choice is for: two choices with the same problem replace one another."""
        sizes = (self.w_layout, self.group_size, self.n, self.k, self.m)
        return (self.x, self.w, self.out, self.x_packed, *sizes, self.zero_point, self.residual)


@dataclass(frozen=True)
class LayerChoice:
    """Measured times of a whole layer that takes and gives 16-bit floats, quantiser and launches included.

    weights  's8', 's4', 's4 two-level', or 'f16', 'bf16'.     inputs  'weight only', 's8 dynamic', 's4 static', ...
    dtype    'f16' or 'bf16'.    m  largest M of the bucket.   us, float_us  medians of the layer and of torch's Linear.
    """

    weights: str
    inputs: str
    zero_point: bool
    group_size: int
    dtype: str
    n: int
    k: int
    m: int
    us: float
    float_us: float

    @property
    def key(self) -> tuple[object, ...]:
        """What the times are of."""
        return (self.weights, self.inputs, self.zero_point, self.group_size, self.dtype, self.n, self.k, self.m)


@dataclass
class Table:
    """GPU name -> problem -> choice; layers: GPU name -> key -> whole layer; notes: GPU name -> how it was measured
    (versions)."""

    gpus: dict[str, dict[tuple[object, ...], Choice]] = field(default_factory=dict)
    notes: dict[str, dict[str, str]] = field(default_factory=dict)
    layers: dict[str, dict[tuple[object, ...], LayerChoice]] = field(default_factory=dict)

    def add(
        self,
        gpu: str,
        choices: Iterable[Choice],
        note: Mapping[str, str] | None = None,
        layers: Iterable[LayerChoice] = (),
    ) -> None:
        """Adds choices and times of layers of a GPU; those for problems that are there already replace them."""
        self.gpus.setdefault(gpu, {}).update({choice.problem: choice for choice in choices})
        if whole := {layer.key: layer for layer in layers}:
            self.layers.setdefault(gpu, {}).update(whole)
        if note is not None:
            self.notes[gpu] = dict(note)

    def merge(self, other: Table) -> None:
        """Adds all choices of another table, which win."""
        for gpu, choices in other.gpus.items():
            self.add(gpu, choices.values(), other.notes.get(gpu), other.layers.get(gpu, {}).values())


def parse(data: bytes, file: str) -> Table:
    """A table from the bytes of a file. Raises CheckpointError naming the file and what is wrong with it."""
    at_most(MAX_BYTES, file)(len(data))
    document = strict_json.loads(data, file)
    if set(document) != {"schema", "gpus"}:
        raise CheckpointError(f"{file}: allowed: an object with the keys schema and gpus")
    if document["schema"] != SCHEMA:
        raise CheckpointError(f"{file}: schema {document['schema']!r}; allowed: {SCHEMA}; run `pyquant tune` again")
    table = Table()
    for gpu, body in _object(document["gpus"], file, "gpus").items():
        entry = _object(body, file, gpu)
        entry = {"layers": [], **entry}
        if not gpu or not gpu.isprintable() or set(entry) != {"note", "choices", "layers"}:
            allowed = "a name in one line, with the keys note, choices and, where there are any, layers"
            raise CheckpointError(f"{file}: GPU {gpu!r}; allowed: {allowed}")
        for key in ("choices", "layers"):
            if not isinstance(entry[key], list):
                raise CheckpointError(f"{file}: {key} of {gpu}: allowed: a list")
        note = {str(k): str(v) for k, v in _object(entry["note"], file, "note").items()}
        choices = [_choice(item, f"{file}: {gpu}") for item in entry["choices"]]
        table.add(gpu, choices, note, [_layer(item, f"{file}: {gpu}") for item in entry["layers"]])
    return table


def dumps(table: Table) -> bytes:
    """The bytes of a file that holds a table; equal tables give equal bytes."""
    gpus = {
        gpu: {"note": table.notes.get(gpu, {}), "choices": _sorted(choices)}
        | ({"layers": _sorted(table.layers[gpu])} if gpu in table.layers else {})
        for gpu, choices in table.gpus.items()
    }
    return (json.dumps({"schema": SCHEMA, "gpus": gpus}, indent=1, sort_keys=True) + "\n").encode()


def _sorted(entries: Mapping[tuple[object, ...], Choice | LayerChoice]) -> list[dict[str, Any]]:
    plain = (asdict(entries[key]) for key in sorted(entries, key=repr))
    return [{name: value for name, value in entry.items() if value is not None} for entry in plain]


def cache_folder() -> Path:
    """Path of the user's table: PYQUANT_CACHE, else pyquant in XDG_CACHE_HOME, else ~/.cache/pyquant.

    Raises CheckpointError where there is none of them.
    """
    own, xdg = os.environ.get("PYQUANT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    if xdg and Path(xdg).is_absolute():
        return Path(xdg) / "pyquant"
    try:
        return Path.home() / ".cache" / "pyquant"
    except RuntimeError:  # no HOME, and a user id without an entry in the table of users
        raise CheckpointError("no home folder; allowed: a folder in PYQUANT_CACHE or XDG_CACHE_HOME") from None


def load() -> Table:
    """The package's table with the user's choices over it; a file that cannot be read is left out with a remark."""
    _remarks.clear()
    table = Table()
    for path_of in (lambda: PACKAGED, lambda: cache_folder() / FILE):
        try:
            path = path_of()
            # regular files only, and their size first: a pipe or a device in the cache must not hold up an import
            data = read_file(path, check=at_most(MAX_BYTES, path))
            table.merge(parse(data, str(path)))
        except FileNotFoundError:
            continue
        except (CheckpointError, OSError) as error:
            _remark(str(error))
    return table


def activate(table: Table) -> None:
    """Hands a table to the compiled plan: selections that start later follow it. Rows that this build does not have
    are left out with a remark."""
    global _edition, _has_float_rows, _layers
    chosen = [choice for choices in table.gpus.values() for choice in choices.values()]
    _has_float_rows = any(choice.w in _HALVES and choice.row != "torch" for choice in chosen)
    _layers = {(gpu, key): layer for gpu, layers in table.layers.items() for key, layer in layers.items()}
    remarks = torch.ops.pyquant._set_tuned(wire(table)).splitlines()
    _edition += 1  # last: another thread would keep an answer of the table before as one of this
    for line in remarks:
        _remark(line)


def edition() -> int:
    """Another number after every activate: what was asked of the plan before may have another answer."""
    return _edition


def has_float_rows() -> bool:
    """Whether a 16-bit product may be another than torch's own: a table that is followed says so for some size."""
    return _has_float_rows


def activate_found() -> None:
    """load and activate, as import does: whatever the cache holds, at worst it is ignored with a warning."""
    try:
        activate(load())
    except Exception as error:  # a choice of kernels changes no result, so it is never a reason not to start
        _remark(f"measured choices are left out: {type(error).__name__}: {str(error)[:200]}")


def layer_time(gpu: str, key: tuple[object, ...]) -> LayerChoice | None:
    """The times of a whole layer (LayerChoice.key) in the table that is followed; None where it was not measured."""
    return _layers.get((gpu, key))


def wire(table: Table) -> str:
    """The table as the compiled plan reads it (csrc/plan/tuned.h)."""
    lines = []
    for gpu, choices in table.gpus.items():
        for c in choices.values():
            fields = [gpu, c.x, c.w, c.out, c.x_packed, c.w_layout, c.group_size, c.n, c.k, c.m, c.row, c.us]
            if c.zero_point is not None or c.residual is not None:
                fields += [bool(c.zero_point), bool(c.residual)]
            lines.append("\t".join(str(int(v) if isinstance(v, bool) else v) for v in fields))
    return "\n".join(lines)


def remarks() -> list[str]:
    """Why tables or choices are not used: damaged files, rows that are gone or refuse. Empty when all is well."""
    try:
        later = torch.ops.pyquant._tuned_remarks().splitlines()
    except NotImplementedError:  # without the compiled library, which keeps them
        later = []
    return list(dict.fromkeys([*_remarks, *later]))


def _remark(text: str) -> None:
    if text not in _remarks:
        _remarks.append(text)
        _log.warning("measured kernel choices: %s", text)


def _object(value: Any, file: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {what} is a {type(value).__name__}; allowed: an object")
    return value


def _choice(item: Any, where: str) -> Choice:
    entry = _entry(item, Choice, where, "a choice")
    for key in ("x", "w", "out"):
        _one_of(entry, key, _TYPES, where)
    _one_of(entry, "w_layout", _LAYOUTS, where)
    _flags(entry, ("x_packed", *({"zero_point", "residual"} & set(entry))), where)
    _numbers(entry, ("group_size", "n", "k", "m"), ("us", "model_us"), where)
    for key in ("row", "model_row"):
        if not isinstance(entry[key], str) or not entry[key].replace("_", "a").isalnum():
            raise CheckpointError(f"{where}: {key} = {entry[key]!r}; allowed: the name of a kernel")
    return Choice(**entry)


def _layer(item: Any, where: str) -> LayerChoice:
    entry = _entry(item, LayerChoice, where, "a layer")
    for key, allowed in (("weights", (*_TYPES, "s4" + TWO_LEVEL)), ("dtype", _HALVES), ("inputs", _INPUTS)):
        _one_of(entry, key, allowed, where)
    _flags(entry, ("zero_point",), where)
    _numbers(entry, ("group_size", "n", "k", "m"), ("us", "float_us"), where)
    return LayerChoice(**entry)


def _entry(item: Any, kind: type[Choice] | type[LayerChoice], where: str, what: str) -> dict[str, Any]:
    """An object with the fields of a record; those that have a default may be missing."""
    names = {f.name for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    entry = _object(item, where, what)
    if not needed <= set(entry) <= names:
        raise CheckpointError(f"{where}: keys {sorted(set(entry) ^ names)}; allowed: {sorted(names)}")
    return entry


def _one_of(entry: Mapping[str, Any], key: str, allowed: Iterable[str], where: str) -> None:
    if not isinstance(entry[key], str) or entry[key] not in allowed:
        raise CheckpointError(f"{where}: {key} = {entry[key]!r}; allowed: {', '.join(allowed)}"[:400])


def _flags(entry: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    for key in keys:
        if not isinstance(entry[key], bool):
            raise CheckpointError(f"{where}: {key} = {entry[key]!r}; allowed: true, false"[:400])


def _numbers(entry: Mapping[str, Any], sizes: Iterable[str], times: Iterable[str], where: str) -> None:
    for key in sizes:
        if type(entry[key]) is not int or not 0 <= entry[key] < 2**31:
            raise CheckpointError(f"{where}: {key} = {entry[key]!r}; allowed: a whole number from 0 to 2^31 - 1")
    for key in times:
        if type(entry[key]) not in (int, float) or not 0 <= entry[key] <= 1e12:
            raise CheckpointError(f"{where}: {key} = {entry[key]!r}; allowed: microseconds from 0 to 1e12")
