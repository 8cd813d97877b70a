"""Partial results: a journal of finished shapes, of one setting only; reports of slices are put together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pyquant.bench.partial import Partial, merge
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.measure.environment import describe_environment
from pyquant.report.records.bench import Ceiling, GemmReport, GemmRow, Unavailable
from pyquant.report.records.record import save_record

ENVIRONMENT = describe_environment("cpu")
KEY = {"gpu": "some GPU", "candidates": ["a", "b"]}


def row(shape: tuple[int, int, int], name: str = "a", us: float = 2.0) -> GemmRow:
    return GemmRow(*shape, name, True, us, 1.0, 0.0, 5, exact=True, sqnr_db=math.inf, moved_bytes=9, ops=8.0)


def fill(record: Partial, shapes: list[tuple[int, int, int]]) -> None:
    for shape in shapes:
        record.add(shape, [row(shape)], [Unavailable("b", "not there", "M=1")])


def test_a_new_process_goes_on_where_the_last_stopped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    with Partial(KEY, ENVIRONMENT, path) as first:
        fill(first, [(1, 2, 3), (4, 5, 6)])
        first.add_ceilings([Ceiling("copy", 10.0, "GB/s"), Ceiling("int8", 5.0, "Gop/s")])
        first.crash("b", "broke the device", "M=1 K=2 N=3")
    with Partial(KEY, ENVIRONMENT, path) as again:
        assert again.cells == first.cells
        assert again.ceilings == first.ceilings
        assert again.crash_of("b", "M=1 K=2 N=3") == "broke the device"
        assert again.crash_of("b", "M=9 K=2 N=3") is None
        again.add_ceilings([Ceiling("copy", 12.0, "GB/s"), Ceiling("int8", 4.0, "Gop/s")])
        again.crash("a", "broke it too", "M=1 K=2 N=3")
        again.add((7, 8, 9), [row((7, 8, 9))], [])
    with Partial(KEY, ENVIRONMENT, path) as last:
        assert set(last.cells) == {(1, 2, 3), (4, 5, 6), (7, 8, 9)}
        assert {c.name: c.value for c in last.ceilings} == {"copy": 12.0, "int8": 5.0}
        assert [c.candidate for c in last.crashed] == ["b", "a"]
        report = last.report("a")
    assert [(r.m, r.k, r.n) for r in report.rows] == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    assert [u.candidate for u in report.unavailable] == ["b", "b", "b", "a"]


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Partial(KEY, ENVIRONMENT) as record:
        fill(record, [(1, 2, 3)])
        record.add_ceilings([Ceiling("copy", 1.0, "GB/s")])
    assert not list(tmp_path.iterdir())


def test_another_setting_and_a_second_process_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    with Partial(KEY, ENVIRONMENT, path) as record:
        fill(record, [(1, 2, 3)])
        with pytest.raises(CheckpointError, match="another process"):
            Partial(KEY, ENVIRONMENT, path)
    with pytest.raises(CheckpointError, match="gpu 'some GPU'"):
        Partial({**KEY, "gpu": "another"}, ENVIRONMENT, path)
    with pytest.raises(CheckpointError, match="rounds"):
        Partial({**KEY, "rounds": 3}, ENVIRONMENT, path)


@pytest.mark.parametrize("text", ["{x", "[]", "{}", '{"record": "GemmReport", "version": 1}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"p\.jsonl"):
        Partial(KEY, ENVIRONMENT, path)
    assert path.read_text() == text


def test_slices_are_merged(tmp_path: Path) -> None:
    def part(name: str, shapes: list[tuple[int, int, int]], us: float, copy: float, **changes: str) -> Path:
        rows = [row(shape, us=us) for shape in shapes]
        environment = replace(ENVIRONMENT, **{"command": name, **changes})
        ceilings, missing = [Ceiling("copy", copy, "GB/s")], [Unavailable("b", "not there")]
        return save_record(tmp_path / name, GemmReport(environment, "a", rows, ceilings, missing))

    first = part("a.json", [(1, 2, 3), (4, 5, 6)], 2.0, 10.0)
    second = part("b.json", [(7, 8, 9), (4, 5, 6)], 3.0, 12.0)
    whole = merge([first, second])
    times = [((r.m, r.k, r.n), r.median_us) for r in whole.rows]
    assert times == [((1, 2, 3), 2.0), ((4, 5, 6), 3.0), ((7, 8, 9), 3.0)]
    assert whole.ceilings == [Ceiling("copy", 12.0, "GB/s")]
    assert whole.unavailable == [Unavailable("b", "not there")]
    with pytest.raises(ArgumentError, match="no file"):
        merge([])
    with pytest.raises(CheckpointError, match="No such file"):
        merge([tmp_path / "none.json"])
    with pytest.raises(ArgumentError, match="gpu = 'another'"):
        merge([first, part("c.json", [(1, 2, 3)], 1.0, 1.0, gpu="another")])
    other = save_record(tmp_path / "d.json", GemmReport(ENVIRONMENT, "a", [row((1, 2, 3), "z")]))
    with pytest.raises(ArgumentError, match="candidates"):
        merge([first, other])
