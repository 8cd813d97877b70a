"""Figures: the tables of a measurement that has no record class of its own, such as a driver under bench/ prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from pyquant.report.records.bench import Bar
from pyquant.report.records.environment import Environment
from pyquant.report.records.record import from_plain, plain_of, record

Cell = bool | int | float | str | list[float] | None
_FORMER: Final = ("AccuracyReport", "EncoderReport", "LatencyAdditivity", "ModelReport", "ScalingReport", "model")


@dataclass(frozen=True)
class FigureTable:
    """Rows under a header; every row has as many cells as the header."""

    title: str
    header: list[str]
    rows: list[list[Cell]]


def _plain(title: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """The plain data of a report as that of Figures."""
    tables, facts = [], []
    shared = {name: report[name] for name in ("environment", "bars", "notes") if name in report}
    for name, value in report.items():
        if name in shared:
            continue
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            rows = [_flat(row) for row in value]
            header = list(dict.fromkeys(column for row in rows for column in row))
            tables.append({"title": name, "header": header, "rows": [[row.get(c) for c in header] for row in rows]})
        elif isinstance(value, Mapping):
            pairs = [[key, _cell(entry)] for key, entry in value.items()]
            tables.append({"title": name, "header": ["name", "value"], "rows": pairs})
        else:
            facts.append([name, _cell(value)])
    if facts:
        tables.insert(0, {"title": "run", "header": ["name", "value"], "rows": facts})
    return {"title": title, "tables": tables, **shared}


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose entries that are objects are a column for each of their keys."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        nested = isinstance(value, Mapping)
        flat.update({f"{name} {key}": _cell(v) for key, v in value.items()} if nested else {name: _cell(value)})
    return flat


def _cell(value: Any) -> Any:
    """Lists of numbers as they are, nested ones flattened; lists of texts as one text."""
    if not isinstance(value, list):
        return value
    entries = [entry for item in value for entry in (item if isinstance(item, list) else [item])]
    return ", ".join(entries) if entries and all(isinstance(entry, str) for entry in entries) else entries


@record("figures", former={name: partial(_plain, name) for name in _FORMER})
@dataclass(frozen=True)
class Figures:
    """Tables of one run on one machine, with the goals that they were held to."""

    title: str
    environment: Environment
    tables: list[FigureTable]
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rows(self, title: str) -> list[dict[str, Cell]]:
        """The rows of one table as {column: cell}. Raises KeyError naming the tables that there are."""
        for table in self.tables:
            if table.title == title:
                return [dict(zip(table.header, row, strict=True)) for row in table.rows]
        raise KeyError(f"{title}; there is {', '.join(table.title for table in self.tables)}")


def figures_of(report: Any) -> Figures:
    """A dataclass of measurements as Figures: a table for each of its lists of dataclasses and each mapping.

    report  has an `environment`, and may have `bars` and `notes`; single values go to a table of the run.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Row:
        ...     threads: int
        ...     speedup: float
        >>> @dataclass(frozen=True)
        ... class Scaling:
        ...     environment: Environment
        ...     rows: list[Row]
        >>> machine = Environment("cpu", "a CPU", [], 2, 2, "2.13", "3.11", "Linux", "1.0")
        >>> figures_of(Scaling(machine, [Row(2, 1.9)])).tables
        [FigureTable(title='rows', header=['threads', 'speedup'], rows=[[2, 1.9]])]
    """
    plain = _plain(type(report).__name__, plain_of(report))
    figures: Figures = from_plain({"kind": "figures", "version": 1, **plain}, type(report).__name__)
    return figures
