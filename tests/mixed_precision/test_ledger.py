"""Rows are worked out once, reported once, and come back from a journal exactly, infinities included."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pyquant.errors import CheckpointError
from pyquant.io.journal import Journal
from pyquant.mixed_precision.ledger import KIND, Ledger
from pyquant.mixed_precision.spread import spread_rows

ROWS = {"a": [0.1, math.inf], "b": [-0.0, -math.inf], "c": [1e-300, 3.0]}


def test_repeated_keys_are_worked_out_and_reported_once(tmp_path: Path) -> None:
    asked: list[str] = []
    steps: list[tuple[str, str, int, int]] = []

    def fn(key: str) -> list[float]:
        asked.append(key)
        return ROWS[key]

    for run in range(2):
        asked.clear()
        steps.clear()
        with Ledger("f", tmp_path / "j", lambda *step: steps.append(step)) as ledger:
            for keys in (["a", "b", "a"], ["b", "c"], ["c"]):
                assert repr(ledger.rows("s", keys, fn, keys, 2, 3)) == repr([ROWS[key] for key in keys])
        assert asked == ([] if run else ["a", "b", "c"])
        assert steps == [("s", "a", 1, 3), ("s", "b", 2, 3), ("s", "c", 3, 3)]


def test_a_failure_keeps_what_was_done(tmp_path: Path) -> None:
    def fails(key: str) -> list[float]:
        if key == "b":
            raise ValueError("b")
        return ROWS[key]

    with pytest.raises(ValueError, match="b"), Ledger("f", tmp_path / "j") as ledger:
        ledger.rows("s", list(ROWS), fails, list(ROWS), 2)
    with Journal(tmp_path / "j", KIND, "f") as journal:
        assert list(journal.entries) == ["a"]


@pytest.mark.parametrize("value", [[1.0], [1.0, 2.0, 3.0], [1.0, "x"], 3, "12", None])
def test_entries_that_are_no_rows_are_refused(tmp_path: Path, value: object) -> None:
    with Journal(tmp_path / "j", KIND, "f") as journal:
        journal.add("a", value)
    with pytest.raises(CheckpointError, match="2 numbers"), Ledger("f", tmp_path / "j") as ledger:
        ledger.rows("s", ["a"], lambda key: [0.0, 0.0], ["a"], 2)


def test_spread_in_one_process() -> None:
    assert spread_rows([], lambda item: [1.0], 1) == []
    new: list[int] = []
    known = [None, [7.0, 8.0], None]
    rows = spread_rows([1, 2, 3], lambda x: [x, x * x], 2, known=known, on_row=lambda i, row: new.append(i))
    assert rows == [[1, 1], [7.0, 8.0], [3, 9]]
    assert new == [0, 2]
    with pytest.raises(ValueError, match="allowed: 2"):
        spread_rows([1], lambda x: [x], 2)
