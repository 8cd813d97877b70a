"""The problem that is searched: groups of layers, formats for each, and tables of what a choice costs and loses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyquant.core import arguments
from pyquant.errors import ArgumentError

Config = tuple[int, ...]  # the index of a format for every group
Table = NDArray[np.float64]
Mask = NDArray[np.bool_]

MAX_OPTIONS: Final = 4096  # groups times formats; far above any model, far below what would fill the memory


@dataclass(frozen=True, eq=False)
class Constraint:
    """A further cost of a configuration, and the most that it may be.

    name   as messages and reports call it: 'size_bytes', 'effective_bits'.
    table  float64 [groups, formats]: what each group adds; finite, not negative.
    limit  the largest total that is allowed.
    base   what the rest of the model adds.

    Example:
        >>> Constraint("effective_bits", [[8.0, 4.0], [8.0, 4.0]], limit=13.0).cost_of((0, 1))
        12.0
    """

    name: str
    table: Table
    limit: float
    base: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _table(f"constraint {self.name!r}", self.table, 2, negative=False))
        _number(f"limit of {self.name!r}", self.limit, low=0)
        _number(f"base of {self.name!r}", self.base, low=0)

    def cost_of(self, config: Config) -> float:
        """The total of a configuration."""
        return math.fsum([self.base, *(float(self.table[g, f]) for g, f in enumerate(config))])

    def allows(self, config: Config) -> bool:
        """Whether a configuration keeps the limit; what its total has from rounding alone is no violation."""
        return self.cost_of(config) <= self.limit * (1 + 1e-12)


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """What each format would cost and lose in each group, and what borders between formats add. Tables are copied.

    groups       names of the groups, in the order of the data through the model; neighbours are adjacent in it.
    formats      names of the formats; the first one is the floating-point one.
    loss         float64 [groups, formats]: what giving ONE group that format loses against the first format (0 there).
                 Finite; noise may make it negative.
    cost         float64 [groups, formats]: microseconds, bytes, bits or operations; finite, not negative.
    cost_base    what the rest of the model costs.
    cost_pairs   float64 [groups - 1, formats, formats]: what conversions cost where group g has one format and group
                 g + 1 another; None: nothing.
    loss_base    the loss of the configuration of first formats.
    loss_pairs   float64 [groups - 1, formats, formats]: losses of neighbours beyond their sum; None: none.
    allowed      bool [groups, formats]: whether the group can have the format; None: everything. What tables say about
                 a format that is not allowed does not matter, it may be NaN.
    constraints  limits that every configuration has to keep.
    Raises ArgumentError naming the field.

    Example:
        >>> problem = SearchProblem(("a", "b"), ("fp32", "int4"), loss=[[0, 1], [0, 3]], cost=[[8, 2], [8, 2]])
        >>> problem.cost_of((0, 1)), problem.loss_of((0, 1)), problem.uniform(1)
        (10.0, 3.0, (1, 1))
    """

    groups: tuple[str, ...]
    formats: tuple[str, ...]
    loss: Table
    cost: Table
    cost_base: float = 0.0
    cost_pairs: Table | None = None
    loss_base: float = 0.0
    loss_pairs: Table | None = None
    allowed: Mask | None = None
    constraints: tuple[Constraint, ...] = ()
    mask: Mask = field(init=False, repr=False)  # `allowed`, filled in

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "groups", _names("groups", self.groups))
        put(self, "formats", _names("formats", self.formats))
        shape = (len(self.groups), len(self.formats))
        if math.prod(shape) > MAX_OPTIONS:
            raise ArgumentError("groups", f"{shape[0]} groups x {shape[1]} formats", f"at most {MAX_OPTIONS} options")
        mask = _mask(self.allowed, shape, self.groups)
        put(self, "mask", mask)
        put(self, "allowed", mask)
        put(self, "loss", _table("loss", self.loss, 2, shape, where=mask))
        put(self, "cost", _table("cost", self.cost, 2, shape, negative=False, where=mask))
        pairs = (max(0, shape[0] - 1), shape[1], shape[1])
        both = mask[:-1, :, None] & mask[1:, None, :]
        for name, negative in (("cost_pairs", False), ("loss_pairs", True)):
            given = getattr(self, name)
            if given is not None:
                put(self, name, _table(name, given, 3, pairs, negative=negative, where=both))
        put(self, "cost_base", _number("cost_base", self.cost_base, low=0))
        put(self, "loss_base", _number("loss_base", self.loss_base))
        put(self, "constraints", tuple(self.constraints))
        for constraint in self.constraints:
            if not isinstance(constraint, Constraint) or constraint.table.shape != shape:
                raise ArgumentError("constraints", constraint, f"Constraint with a table {list(shape)}")
        names = [c.name for c in self.constraints]
        if len(set(names)) != len(names):
            raise ArgumentError("constraints", names, "a name for each")

    @property
    def num_configs(self) -> int:
        """How many configurations are allowed, constraints aside."""
        return math.prod(int(n) for n in self.mask.sum(axis=1))

    def cost_of(self, config: Config) -> float:
        """What the tables say a configuration costs. Raises ArgumentError for one that is not of this problem."""
        return float(self._totals("cost", [self.check(config)])[0])

    def costs_of(self, configs: Sequence[Config]) -> Table:
        """cost_of for many configurations of this problem, which are not checked. -> float64 [configs]."""
        return self._totals("cost", configs)

    def loss_of(self, config: Config) -> float:
        """What the tables predict that a configuration loses. Raises ArgumentError as cost_of."""
        return float(self._totals("loss", [self.check(config)])[0])

    def uniform(self, format_index: int) -> Config:
        """The same format for every group, where a group cannot have it, the nearest before it that it can."""
        if isinstance(format_index, bool) or not 0 <= format_index < len(self.formats):
            raise ArgumentError("format_index", format_index, f"0 to {len(self.formats) - 1}")
        choices = [np.flatnonzero(row) for row in self.mask]
        return tuple(int(max(c[c <= format_index], default=c[0])) for c in choices)

    def check(self, config: Sequence[int]) -> Config:
        """A configuration as a tuple of int. Raises ArgumentError for a wrong length, index or format not allowed."""
        if len(config) != len(self.groups):
            raise ArgumentError("config", f"{len(config)} entries", f"{len(self.groups)}: one for each group")
        checked = tuple(int(f) for f in config)
        for g, f in enumerate(checked):
            if not 0 <= f < len(self.formats) or f != config[g]:
                raise ArgumentError("config", f"{config[g]!r} for {self.groups[g]!r}", f"0 to {len(self.formats) - 1}")
            if not self.mask[g, f]:
                allowed = ", ".join(n for n, ok in zip(self.formats, self.mask[g], strict=True) if ok)
                raise ArgumentError("config", f"{self.formats[f]!r} for {self.groups[g]!r}", allowed)
        return checked

    def violations(self, config: Config) -> list[str]:
        """The constraints that a configuration violates, with both numbers; empty: none."""
        return [f"{c.name} {c.cost_of(config):g} exceeds {c.limit:g}" for c in self.constraints if not c.allows(config)]

    def with_(self, **changes: Any) -> SearchProblem:
        """A copy with other fields."""
        return replace(self, **changes)

    def steps(self, what: str) -> tuple[Table, Table]:
        """The table of the first group [formats], then what each next group adds [groups - 1, formats before, formats].

        what  'cost' or 'loss'. A total is base + first + step + step ..., summed from the left, everywhere.
        """
        table: Table = getattr(self, what)
        pairs: Table | None = getattr(self, f"{what}_pairs")
        alone, size = table[1:, None, :], len(self.formats)
        return table[0], np.broadcast_to(alone, (len(alone), size, size)) if pairs is None else pairs + alone

    def fingerprint(self) -> str:
        """A digest of everything in the problem: equal problems have the same one, in every process."""
        digest = hashlib.sha256()
        for part in self._parts():
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def _parts(self) -> Iterator[bytes]:
        yield from (text.encode() for text in ("groups", *self.groups, "formats", *self.formats))
        for table in (self.loss, self.cost, self.cost_pairs, self.loss_pairs):
            yield b"none" if table is None else table.astype("<f8").tobytes()
        yield self.mask.tobytes()
        yield f"{self.cost_base.hex()} {self.loss_base.hex()}".encode()
        for c in self.constraints:
            yield f"{c.name} {float(c.limit).hex()} {float(c.base).hex()}".encode() + c.table.astype("<f8").tobytes()

    def _totals(self, what: str, configs: Sequence[Config]) -> Table:
        index = np.array(configs, dtype=np.int64).reshape(-1, len(self.groups))
        (first, steps), before = self.steps(what), index[:, 0]
        total: Table = getattr(self, f"{what}_base") + first[before]
        for g, step in enumerate(steps, start=1):
            total = total + step[before, index[:, g]]
            before = index[:, g]
        return total


def _names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(n, str) for n in names):
        raise ArgumentError(argument, repr(names), "a tuple of names")
    checked = tuple(names)
    if not checked or len(set(checked)) != len(checked):
        raise ArgumentError(argument, repr(checked)[:200], "at least one name, none twice")
    return checked


def _mask(allowed: ArrayLike | None, shape: tuple[int, int], groups: tuple[str, ...]) -> Mask:
    mask = np.ones(shape, dtype=bool) if allowed is None else np.array(allowed)
    if mask.dtype != np.bool_ or mask.shape != shape:
        raise ArgumentError("allowed", f"{mask.dtype} {list(mask.shape)}", f"bool {list(shape)}")
    for g, row in enumerate(mask):
        if not row.any():
            raise ArgumentError("allowed", f"no format for {groups[g]!r}", "at least one format for each group")
    mask.setflags(write=False)
    return mask


def _table(
    argument: str,
    values: ArrayLike,
    rank: int,
    shape: tuple[int, ...] | None = None,
    *,
    negative: bool = True,
    where: Mask | None = None,
) -> Table:
    """A read-only float64 copy; what is not allowed becomes 0, so that it can do no harm."""
    try:
        table = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ArgumentError(argument, "what is no table of numbers", "float64 of one shape") from None
    if table.ndim != rank or (shape is not None and table.shape != shape):
        raise ArgumentError(argument, f"shape {list(table.shape)}", f"shape {list(shape)}" if shape else f"{rank} axes")
    if where is not None:
        table[~where] = 0.0
    bad = ~np.isfinite(table) if negative else ~(np.isfinite(table) & (table >= 0))
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ArgumentError(argument, f"{table[index]} at {list(index)}", "finite" if negative else "finite, >= 0")
    table += 0.0  # no negative zeros
    table.setflags(write=False)
    return table


def _number(argument: str, value: Any, low: float = -math.inf) -> float:
    return arguments.number(argument, value.item() if isinstance(value, np.generic) else value, low)
