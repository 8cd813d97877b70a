"""What a benchmark has finished so far, in one JSON file that is whole at any moment.

A run that is killed goes on where it stopped, and slices that ran apart are merged. Only runs of the same setting (the
key) go together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import strict_json
from pyquant.io.atomic import read_file, write_file
from pyquant.results.bench import Ceiling, GemmRow, Unavailable
from pyquant.results.environment import Environment

Shape = tuple[int, int, int]
VERSION = 1


@dataclass
class Cell:
    """Everything about one (M, K, N)."""

    rows: list[GemmRow]
    unavailable: list[Unavailable]


@dataclass
class Partial:
    """Finished cells of one setting.

    key        what must be equal for two runs to be one: device, versions, clock, candidates.
    crashed    candidates that broke the device at a shape: skipped there from then on, and reported.
    path       where it is kept; None keeps it in memory.
    """

    key: dict[str, Any]
    environment: Environment
    path: Path | None = None
    ceilings: list[Ceiling] = field(default_factory=list)
    cells: dict[Shape, Cell] = field(default_factory=dict)
    crashed: list[Unavailable] = field(default_factory=list)

    @staticmethod
    def start(path: str | Path | None, key: Mapping[str, Any], environment: Environment) -> Partial:
        """An empty record, or what the file holds.

        Raises ArgumentError when the file is not such a record or belongs to another setting, naming what differs.
        """
        fresh = Partial(dict(key), environment, None if path is None else Path(path))
        if fresh.path is None or not fresh.path.exists():
            return fresh
        found = read(fresh.path)
        _same(found, fresh, fresh.path)
        found.path, found.environment = fresh.path, environment
        return found

    def add(self, shape: Shape, rows: Sequence[GemmRow], unavailable: Sequence[Unavailable]) -> None:
        """A finished cell; the file holds it when this returns."""
        self.cells[shape] = Cell(list(rows), list(unavailable))
        self.save()

    def add_ceilings(self, ceilings: Sequence[Ceiling]) -> None:
        """Measured limits; of several runs the best counts."""
        best = {c.name: c for c in self.ceilings}
        for c in ceilings:
            if c.name not in best or c.value > best[c.name].value:
                best[c.name] = c
        self.ceilings = list(best.values())
        self.save()

    def crash(self, candidate: str, reason: str, where: str) -> None:
        """A candidate after which the device no longer answers."""
        self.crashed.append(Unavailable(candidate, reason, where))
        self.save()

    def crash_of(self, candidate: str, where: str) -> str | None:
        """Why a candidate is skipped at a shape, or None."""
        return next((c.reason for c in self.crashed if (c.candidate, c.where) == (candidate, where)), None)

    def save(self) -> None:
        if self.path is None:
            return
        data = {
            "record": "GemmPartial", "version": VERSION, "key": self.key, "environment": asdict(self.environment),
            "ceilings": [asdict(c) for c in self.ceilings], "crashed": [asdict(c) for c in self.crashed],
            "cells": [
                {"shape": shape, "rows": [asdict(r) for r in c.rows], "unavailable": [asdict(u) for u in c.unavailable]}
                for shape, c in self.cells.items()
            ],
        }  # fmt: skip
        write_file(self.path, (json.dumps(data, allow_nan=False) + "\n").encode())


def read(path: str | Path) -> Partial:
    """The record in a file.

    Raises ArgumentError when it is not one, or one of another version.
    """
    path = Path(path)
    try:
        data = strict_json.loads(read_file(path, check=_check_size), path.name)
        if (data["record"], data["version"]) != ("GemmPartial", VERSION):
            raise ValueError(f"record {data['record']!r} version {data['version']!r}")
        cells = {
            (int(m), int(k), int(n)): Cell(
                [GemmRow(**r) for r in cell["rows"]], [Unavailable(**u) for u in cell["unavailable"]]
            )
            for cell in data["cells"]
            for m, k, n in [cell["shape"]]
        }
        return Partial(
            data["key"], Environment(**data["environment"]), path, [Ceiling(**c) for c in data["ceilings"]], cells,
            [Unavailable(**c) for c in data["crashed"]],
        )  # fmt: skip
    except OSError as error:
        raise ArgumentError("partial results", str(path), f"a file that can be read ({error})") from None
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            "partial results", f"{path}: {error}"[:240], f"a GemmPartial record, version {VERSION}"
        ) from None


def _check_size(size: int) -> None:
    if size > strict_json.MAX_BYTES:
        raise CheckpointError(f"{size} bytes; allowed: at most {strict_json.MAX_BYTES}")


def merge(paths: Sequence[str | Path]) -> Partial:
    """One record of several slices; a cell that two of them have is taken from the last.

    Raises ArgumentError when there is none, or when two belong to different settings, naming what differs.
    """
    if not paths:
        raise ArgumentError("partial results", "no file", "at least one")
    first, *rest = [read(path) for path in paths]
    merged = Partial(first.key, first.environment, None, first.ceilings, first.cells, first.crashed)
    for path, other in zip(paths[1:], rest, strict=True):
        _same(other, first, Path(path))
        merged.cells |= other.cells
        merged.crashed += [c for c in other.crashed if c not in merged.crashed]
        merged.add_ceilings(other.ceilings)
    return merged


def _same(found: Partial, wanted: Partial, path: Path) -> None:
    for name in sorted({*found.key, *wanted.key}):
        a, b = found.key.get(name), wanted.key.get(name)
        if a != b:
            raise ArgumentError(
                "partial results", f"{path}: {name} = {a!r}"[:300],
                f"results of the same setting ({name} = {b!r})"[:300] + "; name another folder or remove the file",
            )  # fmt: skip
