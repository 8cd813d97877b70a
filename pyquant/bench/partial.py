"""What a GPU benchmark has finished so far: a journal, on the disk shape by shape, behind which a killed run goes on.

Reports of slices that ran apart are merged. Only runs of the same setting go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pyquant.errors import ArgumentError
from pyquant.io.journal import Journal
from pyquant.report.records.bench import Ceiling, GemmReport, GemmRow, Unavailable
from pyquant.report.records.environment import Environment
from pyquant.report.records.record import from_plain, load_record, to_plain

Shape = tuple[int, int, int]
_LIMITS, _CRASH = "limits", "crash"


class Partial:
    """Finished cells of one setting; a context manager, which closes the journal.

    key          what must be equal for two runs to be one: device, versions, clock, candidates.
    environment  of this run.
    path         of the journal; None keeps everything in memory.
    Raises CheckpointError where the file belongs to another setting (naming what differs), is damaged or no journal.

    Attributes: cells, {(M, K, N): report of that shape alone}; ceilings, of several runs the best; crashed, candidates
    that broke the device at a shape: skipped there from then on, and reported.
    """

    def __init__(self, key: Mapping[str, Any], environment: Environment, path: str | Path | None = None) -> None:
        self.environment = environment
        self.cells: dict[Shape, GemmReport] = {}
        self.ceilings: list[Ceiling] = []
        self.crashed: list[Unavailable] = []
        facts = {name: str(value) for name, value in key.items()}
        self._journal = None if path is None else Journal(path, "shapes of bench gemm", facts)
        for name, piece in (self._journal.entries if self._journal else {}).items():
            self._take(name, from_plain(piece, f"{path}: {name}"))

    def add(self, shape: Shape, rows: Sequence[GemmRow], unavailable: Sequence[Unavailable]) -> None:
        """A finished cell; the file holds it when this returns."""
        self._add(" ".join(map(str, shape)), rows=list(rows), unavailable=list(unavailable))

    def add_ceilings(self, ceilings: Sequence[Ceiling]) -> None:
        """Measured limits of one more run."""
        count = sum(name.startswith(_LIMITS) for name in self._journal.entries) if self._journal else 0
        self._add(f"{_LIMITS} {count}", ceilings=list(ceilings))

    def crash(self, candidate: str, reason: str, where: str) -> None:
        """A candidate after which the device no longer answers."""
        self._add(f"{_CRASH} {len(self.crashed)}", unavailable=[Unavailable(candidate, reason, where)])

    def crash_of(self, candidate: str, where: str) -> str | None:
        """Why a candidate is skipped at a shape, or None."""
        return next((c.reason for c in self.crashed if (c.candidate, c.where) == (candidate, where)), None)

    def report(self, baseline: str) -> GemmReport:
        """The finished cells as a report, small weights first."""
        cells = [self.cells[shape] for shape in sorted(self.cells, key=_order)]
        return GemmReport(
            self.environment,
            baseline,
            [row for cell in cells for row in cell.rows],
            self.ceilings,
            [*(item for cell in cells for item in cell.unavailable), *self.crashed],
        )

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the journal."""
        if self._journal is not None:
            self._journal.close()

    def _add(self, name: str, rows: Sequence[GemmRow] = (), **parts: Any) -> None:
        piece = GemmReport(self.environment, "", list(rows), **parts)
        if self._journal is not None:
            self._journal.add(name, to_plain(piece))
        self._take(name, piece)

    def _take(self, name: str, piece: GemmReport) -> None:
        if name.startswith(_LIMITS):
            self.ceilings = _best([*self.ceilings, *piece.ceilings])
        elif name.startswith(_CRASH):
            self.crashed += piece.unavailable
        else:
            m, k, n = map(int, name.split())
            self.cells[m, k, n] = piece


def merge(paths: Sequence[str | Path]) -> GemmReport:
    """One report of those of several slices; a shape that two of them have is taken from the last.

    Raises CheckpointError for a file that is no report of layers; ArgumentError when there is none, or when two were
    measured in different environments or with different candidates, naming what differs.
    """
    if not paths:
        raise ArgumentError("--merge", "no file", "at least one")
    reports = [load_record(path, GemmReport) for path in paths]
    rows: dict[Shape, list[GemmRow]] = {}
    for path, report in zip(paths, reports, strict=True):
        _check_same(report, reports[0], path)
        mine: dict[Shape, list[GemmRow]] = {}
        for row in report.rows:
            mine.setdefault((row.m, row.k, row.n), []).append(row)
        rows |= mine
    return replace(
        reports[0],
        rows=[row for shape in sorted(rows, key=_order) for row in rows[shape]],
        ceilings=_best([ceiling for report in reports for ceiling in report.ceilings]),
        unavailable=list(dict.fromkeys(item for report in reports for item in report.unavailable)),
    )


def _check_same(report: GemmReport, first: GemmReport, path: str | Path) -> None:
    here, there = _setting(report), _setting(first)
    for name in here:
        if here[name] != there[name]:
            allowed = f"reports of the same {name} ({there[name]!r})"
            raise ArgumentError("--merge", f"{path}: {name} = {here[name]!r}"[:300], allowed[:300])


def _setting(report: GemmReport) -> dict[str, Any]:
    candidates = {row.candidate for row in report.rows} | {item.candidate for item in report.unavailable}
    return {**asdict(replace(report.environment, command="")), "candidates": sorted(candidates)}


def _best(ceilings: Sequence[Ceiling]) -> list[Ceiling]:
    best: dict[str, Ceiling] = {}
    for ceiling in ceilings:
        if ceiling.name not in best or ceiling.value > best[ceiling.name].value:
            best[ceiling.name] = ceiling
    return list(best.values())


def _order(shape: Shape) -> tuple[int, ...]:
    m, k, n = shape
    return k * n, k, n, m
