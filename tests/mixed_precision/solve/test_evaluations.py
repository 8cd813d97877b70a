"""The journal: exact numbers, torn ends, and refusal of everything else that is not as it was written."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from search_problems import decreasing

from pyquant.errors import CheckpointError
from pyquant.mixed_precision.solve import Journal, search_front

PROBLEM = decreasing(5)
LOSSES = {(0, 1, 2, 0, 1): 0.1, (2, 2, 2, 2, 2): 1 / 3, (1, 1, 1, 1, 1): math.inf, (0, 0, 0, 0, 1): -5e-324}


def _written(path: Path, context: dict[str, str] | None = None) -> bytes:
    with Journal(path, PROBLEM, context) as journal:
        for config, loss in LOSSES.items():
            journal.append(config, loss)
    return path.read_bytes()


def _read(path: Path, context: dict[str, str] | None = None) -> dict[Any, float]:
    with Journal(path, PROBLEM, context) as journal:
        return dict(journal.losses)


def test_losses_come_back_exactly(tmp_path: Path) -> None:
    _written(tmp_path / "j")
    assert _read(tmp_path / "j") == LOSSES


def test_cut_anywhere_it_holds_the_whole_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = _written(path)
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for size in sorted({*range(0, len(data), 11), *ends, *(i + 1 for i in ends)}):
        path.write_bytes(data[:size])
        entries = max(0, data[:size].count(b"\n") - 1)
        assert _read(path) == dict(list(LOSSES.items())[:entries])
        # and goes on as if nothing had been
        with Journal(path, PROBLEM) as journal:
            for config, loss in list(LOSSES.items())[entries:]:
                journal.append(config, loss)
        assert path.read_bytes() == data


def test_every_changed_byte_is_refused_or_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = _written(path)
    rng = random.Random(0)
    for i in [*range(0, len(data) - 1, 3), len(data) - 1]:
        changed = bytearray(data)
        changed[i] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))
        if i == len(data) - 1:  # the last newline: an end that was cut
            assert _read(path) == dict(list(LOSSES.items())[:-1])
            continue
        with pytest.raises(CheckpointError):
            _read(path)
        assert path.read_bytes() == bytes(changed)


def test_lines_that_are_lost_moved_or_doubled_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    lines = _written(path).splitlines(keepends=True)
    for wrong in (lines[1:], [lines[0], *lines[2:]], [lines[0], lines[2], lines[1]], [*lines, lines[-1]]):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(CheckpointError, match="line"):
            _read(path)


def test_journals_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = _written(path, {"model": "a"})
    with pytest.raises(CheckpointError, match="with problem"):
        Journal(path, PROBLEM.with_(cost_base=1.0), {"model": "a"})
    with pytest.raises(CheckpointError, match="with model"):
        Journal(path, PROBLEM, {"model": "b"})
    assert path.read_bytes() == data
    assert _read(path, {"model": "a"}) == LOSSES


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for data in (b"x", b"no newline in it", b"line\nline\n", b"{}\n", b"\n", b"\x00" * 50):
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            Journal(path, PROBLEM)
        assert path.read_bytes() == data
    with pytest.raises((CheckpointError, IsADirectoryError)):
        Journal(tmp_path, PROBLEM)


def test_one_search_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", PROBLEM), pytest.raises(CheckpointError, match="another process"):
        Journal(tmp_path / "j", PROBLEM)
    Journal(tmp_path / "j", PROBLEM).close()


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
