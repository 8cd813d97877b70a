"""Journals: exact values back, torn ends dropped, all other damage refused, one writer, killed runs."""

from __future__ import annotations

import math
import os
import random
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.journal import Journal


def _fill(path: Path, values: dict[str, object]) -> bytes:
    with Journal(path, "numbers", "f") as journal:
        for key, value in values.items():
            journal.add(key, value)
    return path.read_bytes()


def _entries(path: Path) -> dict[str, object]:
    with Journal(path, "numbers", "f") as journal:
        return dict(journal.entries)


def test_floats_come_back_exactly_and_in_order(tmp_path: Path) -> None:
    draw = random.Random(0)
    values: dict[str, object] = {}
    while len(values) < 200:
        (x,) = struct.unpack("d", draw.randbytes(8))
        if math.isfinite(x):
            values[f"k{draw.random()}"] = x
    values |= {"zero": -0.0, "tiny": 5e-324, "list": [1, 2.5, None, True], "text": 'é\n"', "deep": {"a": [[1]]}}
    _fill(tmp_path / "new" / "a.jsonl", values)
    found = _entries(tmp_path / "new" / "a.jsonl")
    assert list(found) == list(values)
    assert repr(found) == repr(values)


def test_every_cut_gives_the_lines_before_it_and_the_journal_goes_on(tmp_path: Path) -> None:
    values: dict[str, object] = {"a": 0.1, "b": 0.2, "c": 1 / 3}
    whole = _fill(tmp_path / "a.jsonl", values)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(whole[:cut])
        kept = max(0, sum(end <= cut for end in ends) - 1)
        assert _entries(path) == dict(list(values.items())[:kept])
        assert _fill(path, dict(list(values.items())[kept:])) == whole


def test_any_changed_byte_before_the_end_is_refused(tmp_path: Path) -> None:
    whole = _fill(tmp_path / "a.jsonl", {"a": 0.1, "b": 0.25})
    path = tmp_path / "b.jsonl"
    for at in range(len(whole) - 1):  # without the last newline the last line is one that was being written
        for flip in (1, 32):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"b\.jsonl"):
                _entries(path)


def test_lines_that_are_missing_repeated_or_foreign_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    header, a, b = _fill(path, {"a": 0.1, "b": 0.25}).splitlines(keepends=True)
    for damaged in (
        a,
        header + a + a,
        header + header,
        b"{}\n",
        b"\n" + header,
        header + b"\n" + a,
        b"\xff\n",
        header + b + a,
        header + b,
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            _entries(path)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("data", [b"x", b"no newline in it", b"line\nline\n", b"\x00" * 50])
def test_files_of_others_are_refused_and_left_alone(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        _entries(path)
    assert path.read_bytes() == data


def test_another_kind_or_fingerprint_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = _fill(path, {"a": 1})
    for kind, fingerprint in (("numbers", "g"), ("words", "f")):
        with pytest.raises(CheckpointError, match="another model, data or settings"):
            Journal(path, kind, fingerprint)
    assert path.read_bytes() == whole
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="regular"):
        Journal(tmp_path / "pipe", "numbers", "f")


def test_what_json_cannot_hold_and_repeated_keys_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path, "numbers", "f") as journal:
        journal.add("a", 1)
        before = path.read_bytes()
        for key, value in (("a", 2), (3, 2), ("b", math.nan), ("b", math.inf), ("b", object()), ("b", {1, 2})):
            with pytest.raises(ArgumentError):
                journal.add(key, value)  # type: ignore[arg-type]
        assert path.read_bytes() == before
        with pytest.raises(CheckpointError, match="one at a time"):
            Journal(path, "numbers", "f")
    assert _entries(path) == {"a": 1}


def test_a_killed_writer_leaves_every_line_that_it_announced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "from pyquant.io.journal import Journal\n"
        f"journal = Journal({str(path)!r}, 'numbers', 'f')\n"
        "for i in range(10**9):\n    journal.add(str(i), i / 7)\n    print(i, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        told = 0
        while told < 20:
            told = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().splitlines()
    told = int(rest[-1]) if rest and rest[-1].isdigit() else told
    found = _entries(path)
    assert len(found) >= told + 1 - (1 if rest and not rest[-1].isdigit() else 0)
    assert found == {str(i): i / 7 for i in range(len(found))}
