"""The table of measured choices: strict to read, equal bytes for equal tables, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pyquant.errors import CheckpointError
from pyquant.ops import native_available, tuned

CHOICE = tuned.Choice("s8", "s8", "f16", False, "natural", 0, 4096, 1024, 64, "gemm_simt_any", 1.5, "gemm_b", 2.0)
needs_native = pytest.mark.skipif(not native_available(), reason="the compiled library is not built")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYQUANT_CACHE", str(tmp_path))
    yield tmp_path
    monkeypatch.undo()
    if native_available():
        tuned.activate(tuned.load())


def document(**change: object) -> dict:
    return {"schema": 1, "gpus": {"GPU X": {"note": {}, "choices": [asdict(CHOICE) | change]}}}


LAYER = tuned.LayerChoice("s4", "s8 dynamic", False, 128, "bf16", 64, 32, 1, 4.0, 6.0)


def layers(value: object) -> dict:
    return {"schema": 1, "gpus": {"GPU X": {"note": {}, "choices": [], "layers": value}}}


def parse(value: object) -> tuned.Table:
    return tuned.parse(json.dumps(value).encode(), "t.json")


def test_the_packaged_table_is_valid() -> None:
    table = tuned.parse(tuned.PACKAGED.read_bytes(), "tuned.json")
    assert json.loads(tuned.PACKAGED.read_bytes())["schema"] == tuned.SCHEMA
    assert all(choices for choices in table.gpus.values())


def test_round_trip_and_merge() -> None:
    table = tuned.Table()
    table.add("GPU X", [CHOICE, replace(CHOICE, m=128)], {"torch": "2"})
    again = tuned.parse(tuned.dumps(table), "t.json")
    assert again == table
    assert tuned.dumps(again) == tuned.dumps(table)
    assert "layers" not in json.loads(tuned.dumps(table))["gpus"]["GPU X"]  # as older versions read it
    assert "residual" not in json.loads(tuned.dumps(table))["gpus"]["GPU X"]["choices"][0]
    other = tuned.Table()
    other.add("GPU X", [replace(CHOICE, row="gemm_c")])
    other.add("GPU Y", [CHOICE])
    table.merge(other)
    assert {c.row for c in table.gpus["GPU X"].values()} == {"gemm_c", "gemm_simt_any"}
    assert len(table.gpus["GPU X"]) == 2
    assert set(table.gpus) == {"GPU X", "GPU Y"}
    other.add("GPU X", [], layers=[LAYER])
    table.merge(other)
    assert tuned.parse(tuned.dumps(table), "t.json").layers == {"GPU X": {LAYER.key: LAYER}}


def check_that_the_users_choice_wins(folder: Path) -> None:
    """A table in the package and one in the user's cache that differ about one problem: the user's is followed."""
    packaged, cache = folder / "packaged.json", folder / "cache"
    cache.mkdir()
    theirs, ours = tuned.Table(), tuned.Table()
    theirs.add("GPU X", [replace(CHOICE, row="gemm_simt_any"), replace(CHOICE, m=128, row="gemm_simt_any")])
    ours.add("GPU X", [replace(CHOICE, row="gemm_sm80_s8s8_128x128x64")])
    packaged.write_bytes(tuned.dumps(theirs))
    (cache / tuned.FILE).write_bytes(tuned.dumps(ours))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "PACKAGED", packaged)
        patch.setenv("PYQUANT_CACHE", str(cache))
        found = tuned.load()
    rows = {choice.m: choice.row for choice in found.gpus["GPU X"].values()}
    assert rows == {64: "gemm_sm80_s8s8_128x128x64", 128: "gemm_simt_any"}


def test_the_users_choice_beats_the_packages(tmp_path: Path) -> None:
    """Planted in ops/planted_ops.py: the package's table read last."""
    check_that_the_users_choice_wins(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {},
        {"schema": 1},
        {"schema": 2, "gpus": {}},
        {"schema": 1, "gpus": []},
        {"schema": 1, "gpus": {"": {}}},
        {"schema": 1, "gpus": {"a\tb": {"note": {}, "choices": []}}},
        {"schema": 1, "gpus": {"a": {"choices": []}}},
        {"schema": 1, "gpus": {"a": {"note": {}, "choices": {}}}},
        document(x="s9"),
        document(n=-1),
        document(n=1.5),
        document(n=True),
        document(us="1"),
        document(us=-1),
        document(us=1e300),
        document(row=""),
        document(row="a\tb"),
        document(row="a\nb"),
        document(w_layout="odd"),
        document(x_packed=1),
        document(more=1),
        document(zero_point=1),
        document(residual="no"),
        layers({}),
        layers([{}]),
        layers([asdict(LAYER) | {"us": -1}]),
        layers([asdict(LAYER) | {"inputs": "s9 dynamic"}]),
        layers([asdict(LAYER) | {"zero_point": 0}]),
    ],
)
def test_damaged_tables_are_refused_with_the_name_of_the_file(bad: object) -> None:
    with pytest.raises(CheckpointError, match=r"t\.json"):
        parse(bad)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"nan", b"[" * 100000, b" " * (tuned.MAX_BYTES + 1)])
def test_bytes_that_are_no_json_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"t\.json"):
        tuned.parse(data, "t.json")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tuned.cache_folder() == tmp_path
    monkeypatch.delenv("PYQUANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert tuned.cache_folder() == Path("/x/pyquant")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tuned.cache_folder() == Path.home() / ".cache" / "pyquant"


@needs_native
def test_the_users_table_is_followed_and_unknown_rows_are_said(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    native = pytest.importorskip("pyquant._native", reason="the compiled module is not built")
    problem = {"m": 60, "n": 4096, "k": 1024, "out": "f16"}
    device = {"sm": 80, "sm_count": 108, "name": "GPU X"}
    table = tuned.Table()
    table.add("GPU X", [CHOICE, replace(CHOICE, m=128, row="gemm_gone")])
    (cache / tuned.FILE).write_bytes(tuned.dumps(table))
    with caplog.at_level(logging.WARNING, logger="pyquant.tuned"):
        tuned.activate(tuned.load())
    assert native.tuned(problem, device) == ("gemm_simt_any", 1.5)
    assert "gemm_gone" in caplog.text
    assert any("gemm_gone" in line for line in tuned.remarks())
    (cache / tuned.FILE).unlink()
    tuned.activate(tuned.load())
    assert native.tuned(problem, device) is None
    assert not any("gemm_gone" in line for line in tuned.remarks())


@needs_native
def test_a_damaged_table_is_left_out_with_a_remark(cache: Path) -> None:
    (cache / tuned.FILE).write_bytes(b"{")
    tuned.activate(tuned.load())
    assert any(str(cache) in line for line in tuned.remarks())


def test_a_damaged_table_does_not_hinder_import(cache: Path) -> None:
    (cache / tuned.FILE).write_bytes(b"{")
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", "import pyquant; from pyquant.ops import tuned; print(tuned.remarks())"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    if native_available():
        assert tuned.FILE in run.stdout
    assert sorted(p.name for p in cache.iterdir()) == [tuned.FILE], "import writes no file"
