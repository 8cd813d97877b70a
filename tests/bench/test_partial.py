"""Partial results: whole at any moment, one setting only, slices put together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pyquant.bench.partial import Partial, merge, read
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.results.bench import Ceiling, GemmRow, Unavailable

ENVIRONMENT = describe_environment("cpu")
KEY = {"gpu": "some GPU", "candidates": ["a", "b"]}


def row(shape: tuple[int, int, int], name: str = "a", us: float = 2.0) -> GemmRow:
    return GemmRow(*shape, name, True, us, 1.0, 0.0, 5, exact=True, sqnr_db=40.0, moved_bytes=9, ops=8.0, peak="int8")


def filled(path: Path, shapes: list[tuple[int, int, int]], key: dict = KEY, us: float = 2.0) -> Partial:
    record = Partial.start(path, key, ENVIRONMENT)
    for shape in shapes:
        record.add(shape, [row(shape, us=us)], [Unavailable("b", "not there", "M=1")])
    return record


def test_a_new_process_goes_on_where_the_last_stopped(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    first = filled(path, [(1, 2, 3), (4, 5, 6)])
    first.add_ceilings([Ceiling("copy", 10.0, "GB/s")])
    first.crash("b", "broke the device", "M=1 K=2 N=3")
    again = Partial.start(path, KEY, ENVIRONMENT)
    assert again.cells == first.cells
    assert again.ceilings == first.ceilings
    assert again.crash_of("b", "M=1 K=2 N=3") == "broke the device"
    assert again.crash_of("b", "M=9 K=2 N=3") is None
    again.add((7, 8, 9), [row((7, 8, 9))], [])
    assert set(read(path).cells) == {(1, 2, 3), (4, 5, 6), (7, 8, 9)}


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    record = filled(path, [(1, 2, 3)])

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        record.add((4, 5, 6), [], [])
    assert set(read(path).cells) == {(1, 2, 3)}
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_another_setting_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    filled(path, [(1, 2, 3)])
    with pytest.raises(ArgumentError, match="gpu = 'some GPU'"):
        Partial.start(path, {**KEY, "gpu": "another"}, ENVIRONMENT)
    with pytest.raises(ArgumentError, match="rounds"):
        Partial.start(path, {**KEY, "rounds": 3}, ENVIRONMENT)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"record": "GemmReport", "version": 1}', '{"record": "GemmPartial", "version": 99}'],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"p\.json"):
        read(path)
    assert path.read_text() == text


def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    filled(path, [(1, 2, 3)])
    data = json.loads(path.read_text())
    data["cells"][0]["rows"][0]["surprise"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match="surprise"):
        read(path)


def test_slices_are_merged(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    filled(a, [(1, 2, 3), (4, 5, 6)]).add_ceilings([Ceiling("copy", 10.0, "GB/s"), Ceiling("int8", 5.0, "Gop/s")])
    filled(b, [(4, 5, 6), (7, 8, 9)], us=3.0).add_ceilings([Ceiling("copy", 12.0, "GB/s")])
    whole = merge([a, b])
    assert set(whole.cells) == {(1, 2, 3), (4, 5, 6), (7, 8, 9)}
    assert whole.cells[4, 5, 6].rows[0].median_us == 3.0  # the last one's
    assert {c.name: c.value for c in whole.ceilings} == {"copy": 12.0, "int8": 5.0}
    assert whole.path is None
    with pytest.raises(ArgumentError, match="no file"):
        merge([])
    with pytest.raises(ArgumentError, match="No such file"):
        merge([tmp_path / "none.json"])
    other = tmp_path / "c.json"
    filled(other, [(1, 2, 3)], {**KEY, "gpu": "another"})
    with pytest.raises(ArgumentError, match="another"):
        merge([a, other])
