"""No writer follows a link that somebody planted, under its own name or under that of its temporary."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import pyquant
from pyquant.errors import PyquantError
from pyquant.io.atomic import SaveDirectory, write_file
from pyquant.io.journal import Journal
from pyquant.ptq.ranges_file import save_ranges
from pyquant.qat import monitor
from pyquant.recipe import Recipe
from pyquant.report.render import write_text

ROW = dict.fromkeys(monitor.COLUMNS, 1)


def append(path: Path) -> None:
    monitor._append(path, [ROW])


def saved(path: Path) -> None:
    pyquant.save_pretrained(nn.Linear(2, 2), path.parent)


# name of the file, writer
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "Journal": ("j.jsonl", lambda path: Journal(path, "kind", "facts").close()),
    "QATMonitor rows": ("m.csv", append),
    "QATMonitor half line": ("m.csv", monitor._open_csv),
    "report text": ("r.md", lambda path: write_text(path, "report")),
    "write_file": ("f", lambda path: write_file(path, b"data")),
    "ranges": ("calibration.json", lambda path: save_ranges(path, {}, Recipe())),
    "manifest": ("manifest.json", saved),
    "config": ("config.json", saved),
    "index": ("model.safetensors.index.json", saved),
}


def contents(kind: str) -> bytes | None:
    half_a_line = (",".join(monitor.COLUMNS) + "\n1,2").encode()
    return {"full": b"precious", "empty": b"", "its own": half_a_line, "none": None}[kind]


@pytest.mark.parametrize("kind", ["full", "empty", "its own", "none"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_planted_link_is_never_written_through(name: str, kind: str, tmp_path: Path) -> None:
    file, writer = WRITERS[name]
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    folder.mkdir()
    data = contents(kind)
    if data is not None:
        victim.write_bytes(data)
    (folder / file).symlink_to(victim)
    with contextlib.suppress(PyquantError, OSError):  # refused; a rename that replaces the link is right as well
        writer(folder / file)
    assert (victim.read_bytes() if victim.exists() else None) == data
    assert not any(entry.name.endswith(".tmp") for entry in folder.iterdir())


@pytest.mark.parametrize("name", ["Journal", "QATMonitor rows"])
def test_files_that_grow_say_that_they_met_a_link(name: str, tmp_path: Path) -> None:
    file, writer = WRITERS[name]
    (tmp_path / file).symlink_to(tmp_path / "victim")
    with pytest.raises(PyquantError, match="a link"):
        writer(tmp_path / file)


@pytest.mark.parametrize("name", WRITERS)
def test_a_pipe_in_the_place_of_the_file_holds_nothing_up(name: str, tmp_path: Path) -> None:
    file, writer = WRITERS[name]
    os.mkfifo(tmp_path / file)
    with contextlib.suppress(PyquantError, OSError):
        writer(tmp_path / file)


@pytest.mark.parametrize("writer", [lambda folder: write_file(folder / "f", b"x"), lambda folder: stage(folder)])
def test_a_link_under_the_name_of_the_temporary_is_refused(
    writer: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name cannot be guessed; here it is known, and still nothing is written through it."""
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for ending in ("tmp", "file.tmp"):
        (tmp_path / f".pyquant-{'0' * 32}.{ending}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        writer(tmp_path)
    assert victim.read_bytes() == b"precious"


def stage(folder: Path) -> None:
    with SaveDirectory(folder) as out:
        out.stage(b"x")


def test_the_monitor_still_goes_on_with_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    append(path)
    with path.open("ab") as file:
        file.write(b"1,2")
    monitor._open_csv(path)
    append(path)
    assert len(list(csv.DictReader(io.StringIO(path.read_text())))) == 2


def test_a_folder_that_is_replaced_meanwhile_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both names are looked up in the folder that was opened, wherever its name leads by then."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    real = os.fsync

    def swap(fd: int) -> None:
        real(fd)
        if not (tmp_path / "moved").exists():
            folder.rename(tmp_path / "moved")
            folder.symlink_to(other)

    monkeypatch.setattr(os, "fsync", swap)
    write_file(folder / "f", b"data")
    assert not list(other.iterdir())
    assert (tmp_path / "moved" / "f").read_bytes() == b"data"
