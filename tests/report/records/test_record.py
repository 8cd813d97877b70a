"""Records go to files and come back equal; what is damaged is named."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pyquant.errors import CheckpointError
from pyquant.report.records.record import from_plain, load_record, record, save_record, to_plain


@dataclass(frozen=True)
class Inner:
    name: str
    value: float


@record("test-outer")
@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: list[Inner]
    table: dict[str, dict[str, float]]
    pair: tuple[int, float]
    note: str | None = None
    flags: tuple[bool, ...] = ()
    extra: dict[str, int] = field(default_factory=dict)


VALUE = Outer(Inner("a", 1.5), [Inner("b", math.inf)], {"x": {"y": -math.inf}}, (3, 0.1), None, (True,), {"k": 2**53})


def test_a_record_returns_from_its_file_equal(tmp_path: Path) -> None:
    assert load_record(save_record(tmp_path / "r.json", VALUE), Outer) == VALUE


def test_nan_survives(tmp_path: Path) -> None:
    value = Outer(Inner("a", math.nan), [], {}, (0, 0.0))
    assert math.isnan(load_record(save_record(tmp_path / "r.json", value), Outer).inner.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("inner"), "no field 'inner'"),
        (lambda d: d.update(colour=1), "unknown field 'colour'"),
        (lambda d: d.update(kind="nothing"), "kind 'nothing'"),
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d["inner"].update(value="much"), "record.inner.value"),
        (lambda d: d.update(pair=[1]), "2 entries"),
        (lambda d: d.update(pair=[True, 0.5]), r"record.pair\[0\]"),
        (lambda d: d.update(note=3), "record.note"),
        (lambda d: d.update(table={"x": 3}), r"record.table\['x'\]"),
    ],
)
def test_what_is_wrong_is_named(change, named: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(json.dumps(to_plain(VALUE)))
    change(data)
    with pytest.raises(CheckpointError, match=named):
        from_plain(data)


def test_another_class_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = save_record(tmp_path / "r.json", VALUE)
    with pytest.raises(CheckpointError, match="allowed: a Inner"):
        load_record(path, Inner)
    with pytest.raises(CheckpointError, match="No such file"):
        load_record(tmp_path / "none.json")


@pytest.mark.parametrize(
    "head", ['"kind": "search", "version": []', '"kind": "search", "version": 2.0', '"record": []']
)
def test_a_head_of_another_type_is_refused_by_our_error(head: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{" + head + "}")
    with pytest.raises(CheckpointError, match="allowed"):
        load_record(tmp_path / "bad.json")
