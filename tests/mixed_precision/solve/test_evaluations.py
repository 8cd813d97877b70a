"""The journal of search_front: exact losses, what is refused, and a search that goes on from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from search_problems import decreasing

from pyquant.errors import CheckpointError
from pyquant.mixed_precision.solve import search_front
from pyquant.mixed_precision.solve.measurements import Measurements, open_journal

PROBLEM = decreasing(5)
LOSSES = {(0, 1, 2, 0, 1): 0.1, (2, 2, 2, 2, 2): 1 / 3, (1, 1, 1, 1, 1): math.inf, (0, 0, 0, 0, 1): -5e-324}


def _measure(path: Path, **losses: Any) -> list[float]:
    def never(config: tuple[int, ...]) -> float:
        raise AssertionError(config)

    with open_journal(path, PROBLEM) as journal:
        evaluate = losses.get("evaluate", never)
        return Measurements(PROBLEM, evaluate, 9, journal=journal).measure(list(LOSSES))


def test_losses_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "j"
    assert _measure(path, evaluate=LOSSES.__getitem__) == list(LOSSES.values())
    assert _measure(path) == list(LOSSES.values())
    with open_journal(path, PROBLEM) as journal:  # as it has always been written
        assert journal.entries["2 2 2 2 2"] == (1 / 3).hex()
        assert journal.entries["1 1 1 1 1"] == "inf"


def test_journals_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    _measure(path, evaluate=LOSSES.__getitem__)
    data = path.read_bytes()
    with pytest.raises(CheckpointError, match="with problem"):
        open_journal(path, PROBLEM.with_(cost_base=1.0))
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("0 1", "0x1p0"),
        ("0 1 2 0 9", "0x1p0"),
        ("x", "0x1p0"),
        ("0 0 0 0 1", "nan"),
        ("0 0 0 0 1", "y"),
        ("0 0 0 0 1", 1),
    ],
)
def test_entries_that_are_no_evaluation_are_refused(tmp_path: Path, key: str, value: object) -> None:
    with open_journal(tmp_path / "j", PROBLEM) as journal:
        journal.add(key, value)
    with pytest.raises(CheckpointError, match="no evaluation of this problem"):
        search_front(PROBLEM, LOSSES.__getitem__, 8, journal=tmp_path / "j")
    with open_journal(tmp_path / "j", PROBLEM):  # the refusal released it
        pass


def test_one_search_at_a_time(tmp_path: Path) -> None:
    with open_journal(tmp_path / "j", PROBLEM), pytest.raises(CheckpointError, match="another process"):
        search_front(PROBLEM, LOSSES.__getitem__, 8, journal=tmp_path / "j")


def test_a_search_with_its_journal_evaluates_nothing_twice(tmp_path: Path) -> None:
    calls: list[Any] = []

    def evaluate(config: tuple[int, ...]) -> float:
        calls.append(config)
        return PROBLEM.loss_of(config) * 1.1

    first = search_front(PROBLEM, evaluate, 8, journal=tmp_path / "j", stop_gain=0.0)
    assert len(calls) == 8
    again = search_front(PROBLEM, evaluate, 8, journal=tmp_path / "j", stop_gain=0.0)
    assert (again, len(calls)) == (first, 8)
    more = search_front(PROBLEM, evaluate, 10, journal=tmp_path / "j", stop_gain=0.0)
    assert (more[:8], len(calls)) == (first, 10)
    assert more == search_front(PROBLEM, evaluate, 10, stop_gain=0.0)
