"""LatencyTable: what each group of layers costs in each format on one machine, and what a configuration will take."""

from __future__ import annotations

import math
import operator
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pyquant.core import arguments
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.report.records.float_format import FLOAT, is_float, renamed
from pyquant.report.records.record import load_record, record, save_record

Row = tuple[float | None, ...]  # an entry for each format; None: the group cannot take it
_DTYPES: Final = {" float32,": ("fp32", 32), " float16,": ("fp16", 16), " bfloat16,": ("bf16", 16)}


@dataclass(frozen=True)
class MeasuredConfig:
    """A configuration that was run as a whole, without timers inside.

    config        the index of a format for every group.
    measured_us   the median; low_us, high_us: its 95 % interval.
    predicted_us  what the table says.
    """

    config: tuple[int, ...]
    measured_us: float
    low_us: float
    high_us: float
    predicted_us: float


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 called the floating-point format fp16 and 16 bits whatever it was; the fingerprint has the dtypes."""
    facts, formats = data.get("fingerprint"), data.get("formats")
    if not isinstance(facts, dict) or not isinstance(formats, list) or not formats or not is_float(str(formats[0])):
        return data
    dtypes = {word for name, fact in facts.items() if name.startswith("layer ") for word in _DTYPES if word in fact}
    name, bits = _DTYPES[dtypes.pop()] if len(dtypes) == 1 else (FLOAT, 16)
    upgraded = renamed(data, name)
    if "formats" in facts:
        upgraded["fingerprint"] = {**facts, "formats": ", ".join(map(str, upgraded["formats"]))}
    for entry in ("weight_bits", "input_bits"):
        if isinstance(upgraded.get(entry), list):
            upgraded[entry] = [bits, *upgraded[entry][1:]]
    return upgraded


@record("latency-table", version=2, upgrades={1: _from_1})
@dataclass(frozen=True)
class LatencyTable:
    """Microseconds of every group in every format, and of everything else, measured on one machine.

    groups, formats   names; the first format is the floating-point one, called by its dtype: 'fp32', 'fp16', 'bf16', or
                      'float' where layers differ. layers: names of each group's layers.
    weight_bits, input_bits   of each format, those of the dtype for floating point.
    base_us           everything that is in no group.
    group_us          [groups][formats], None where a group cannot take a format; interval_us: 95 % intervals of those.
    layer_us          the same for each layer: {name: [formats]}; the layers of a group add up to it.
    border_us         [groups - 1][formats][formats]: what it adds that a group has one format and the next group
                      another. None: layers take and give floating-point tensors, quantising is part of the layer.
    uniform           the uniform configurations, measured end to end. base_us and scale are fitted to them and to all
                      configurations of the design, which are run as wholes too.
    held_out          random configurations that the table did not see, measured in the same rounds.
    clock, rounds     how time was taken, and how often.
    fingerprint       {entry: value} of what the figures belong to: device, versions, threads, input shapes, layers.
    scale             by which the medians of group_us were multiplied so that those configurations come out.
    notes             what a reader should know.
    Raises ArgumentError where tables do not fit together.

    Example:
        >>> table = LatencyTable(("a", "b"), (("a",), ("b",)), ("fp32", "int8"), (32, 8), (32, 8), 5.0,
        ...                      ((8.0, 4.0), (6.0, None)), (((8, 8), (4, 4)), ((6, 6), None)),
        ...                      {"a": (8.0, 4.0), "b": (6.0, None)}, None)
        >>> table.predict((1, 0)), table.predict({"a": "float", "b": "fp32"})
        (15.0, 19.0)
    """

    groups: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    formats: tuple[str, ...]
    weight_bits: tuple[int, ...]
    input_bits: tuple[int, ...]
    base_us: float
    group_us: tuple[Row, ...]
    interval_us: tuple[tuple[tuple[float, float] | None, ...], ...]
    layer_us: dict[str, Row]
    border_us: tuple[tuple[Row, ...], ...] | None
    uniform: tuple[MeasuredConfig, ...] = ()
    held_out: tuple[MeasuredConfig, ...] = ()
    clock: str = ""
    rounds: int = 0
    fingerprint: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        groups, formats = len(self.groups), len(self.formats)
        _shape("layers", self.layers, groups)
        for argument in ("weight_bits", "input_bits"):
            _shape(argument, getattr(self, argument), formats)
        for argument in ("group_us", "interval_us"):
            _shape(argument, getattr(self, argument), groups, formats)
        names = [name for layers in self.layers for name in layers]
        if sorted(self.layer_us) != sorted(names):
            raise ArgumentError("layer_us", ", ".join(self.layer_us), f"the layers of the groups: {', '.join(names)}")
        for name, row in self.layer_us.items():
            _shape(f"layer_us[{name!r}]", row, formats)
        if self.border_us is not None:
            _shape("border_us", self.border_us, groups - 1, formats, formats)
        numbers = [("base_us", self.base_us), *(("group_us", us) for row in self.group_us for us in row)]
        numbers += [("border_us", us) for border in self.border_us or () for row in border for us in row]
        for argument, us in numbers:
            if us is not None and not 0 <= us < math.inf:
                raise ArgumentError(argument, us, "microseconds: finite, >= 0")

    # ---- what it says

    @property
    def allowed(self) -> tuple[tuple[bool, ...], ...]:
        """[groups][formats]: whether there is a figure."""
        return tuple(tuple(us is not None for us in row) for row in self.group_us)

    def predict(self, config: Sequence[int] | Mapping[str, str]) -> float:
        """Microseconds of a configuration: base_us, its groups, and its borders.

        config  the index of a format for every group, or {group: format} with every group; 'float' is the first
                format whatever it is called.
        Raises ArgumentError for a configuration that is not of this table, also where a group cannot take a format.
        """
        chosen = self.check(config)
        parts = [self.base_us]
        for group, (row, f) in enumerate(zip(self.group_us, chosen, strict=True)):
            parts.append(_known(row[f], self.groups[group], self.formats[f]))
        if self.border_us is not None:
            for border, (before, f) in zip(self.border_us, pairwise(chosen), strict=True):
                parts.append(border[before][f] or 0.0)
        return math.fsum(parts)

    def us(self, group: str, format: str) -> float:
        """Microseconds of one group in one format. Raises ArgumentError for unknown names and refused formats."""
        return _known(self.group_us[self._group(group)][self._format(format)], group, format)

    def check(self, config: Sequence[int] | Mapping[str, str]) -> tuple[int, ...]:
        """A configuration as indices. Raises ArgumentError as predict."""
        if isinstance(config, Mapping):
            if sorted(config) != sorted(self.groups):
                raise ArgumentError("config", ", ".join(map(str, config)), f"every group: {', '.join(self.groups)}")
            return tuple(self._format(config[group]) for group in self.groups)
        allowed = f"{len(self.groups)} numbers in [0, {len(self.formats)})"
        try:
            indices = tuple(operator.index(f) for f in config)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError("config", arguments.shown(config), allowed) from None
        if len(indices) != len(self.groups) or any(not 0 <= f < len(self.formats) for f in indices):
            raise ArgumentError("config", repr(indices)[:200], allowed)
        return indices

    def layer_costs(self, *, inputs: bool = False) -> dict[str, dict[int, float]]:
        """{layer: {4: us, 8: us, 16: us}}, as LearnedPrecision takes it: the bits of the weights, or with `inputs` the
        larger of weights and inputs; 16 means floating point whatever its dtype. Of formats with equal bits the
        first counts; a layer lacks what it cannot take.

        Raises ArgumentError where the table has no format of 4, 8 or 16 bits.
        """
        pairs = zip(self.weight_bits, self.input_bits, strict=True)
        bits = [16 if i == 0 else max(pair) if inputs else pair[0] for i, pair in enumerate(pairs)]
        missing = [level for level in (4, 8, 16) if level not in bits]
        if missing:
            raise ArgumentError("formats", ", ".join(self.formats), f"also one of {missing[0]} bits")
        index = {level: bits.index(level) for level in (4, 8, 16)}
        return {
            name: {level: us for level, f in index.items() if (us := row[f]) is not None}
            for name, row in self.layer_us.items()
        }

    # ---- how far to trust it

    @property
    def bias(self) -> float | None:
        """Predicted over measured, the median over held_out; None where nothing was held out."""
        ratios = [m.predicted_us / m.measured_us for m in self.held_out]
        return statistics.median(ratios) if ratios else None

    @property
    def median_error(self) -> float | None:
        """The median of |predicted / measured - 1| over held_out."""
        errors = self._errors()
        return statistics.median(errors) if errors else None

    @property
    def worst_error(self) -> float | None:
        """The largest of |predicted / measured - 1| over held_out."""
        return max(self._errors(), default=None)

    def require(self, fingerprint: Mapping[str, str], where: str = "latency table") -> None:
        """Raise CheckpointError naming the first entry in which the table's fingerprint and this one differ."""
        arguments.mapping("fingerprint", fingerprint, "entries of a fingerprint to their texts")
        for entry in (*self.fingerprint, *fingerprint):
            here, there = fingerprint.get(entry, "nothing"), self.fingerprint.get(entry, "nothing")
            if here != there:
                raise CheckpointError(f"{where}: {entry} is {there!r}, and {here!r} here: measure again")

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON, whole or not at all. -> the path."""
        return save_record(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], fingerprint: Mapping[str, str] | None = None) -> LatencyTable:
        """The table in a file. Raises CheckpointError: damaged, another record, or not of this fingerprint."""
        try:
            table = load_record(path, cls)
        except ArgumentError as error:
            raise CheckpointError(f"{path}: {error}") from None
        if fingerprint is not None:
            table.require(fingerprint, str(path))
        return table

    def _errors(self) -> list[float]:
        return [abs(m.predicted_us / m.measured_us - 1) for m in self.held_out]

    def _group(self, name: str) -> int:
        if name not in self.groups:
            raise ArgumentError("group", repr(name), ", ".join(self.groups))
        return self.groups.index(name)

    def _format(self, name: str) -> int:
        if name not in self.formats and is_float(name) and is_float(self.formats[0]):
            return 0
        if name not in self.formats:
            raise ArgumentError("format", repr(name), ", ".join(self.formats))
        return self.formats.index(name)


def _known(us: float | None, group: str, format: str) -> float:
    if us is None:
        raise ArgumentError("config", f"{group}: {format}", "formats that the group can take")
    return us


def _shape(argument: str, values: Sequence[object], length: int, *rest: int) -> None:
    if len(values) != length:
        raise ArgumentError(argument, f"{len(values)} entries", f"{length}")
    if rest:
        for value in values:
            _shape(argument, value, *rest)  # type: ignore[arg-type]
