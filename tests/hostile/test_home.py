"""Nothing in cache or home breaks or hangs an import, and the user's measured choices win over the package's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pyquant.ops import tuned

ROOT = Path(__file__).resolve().parents[2]
CHOICE = tuned.Choice("s8", "s8", "f16", False, "natural", 0, 4096, 1024, 64, "gemm_simt_any", 1.5, "gemm_b", 2.0)
DIGITS = (
    '{"schema": 1, "gpus": {"G": {"note": {}, "choices": ['
    + json.dumps(asdict(CHOICE)).replace('"us": 1.5', '"us": ' + "9" * 401)
    + "]}}}"
)


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


# name -> what lies where tuned.json should
PLANTS: dict[str, Callable[[Path], object]] = {
    "a number of 401 digits": lambda path: write(path, DIGITS.encode()),
    "an integer of 100 000 digits": lambda path: write(path, b'{"schema": ' + b"9" * 100_000 + b', "gpus": {}}'),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a loop of links": lambda path: path.symlink_to(path),
    "a link to a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a sparse file of 1 TiB": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "an unreadable file": unreadable,
    "a name that is no text": lambda path: write(
        path, b'{"schema": 1, "gpus": {"\\ud800": {"note": {}, "choices": []}}}'
    ),
    "lists in lists": lambda path: write(path, b"[" * 2**20),
    "bytes": lambda path: write(path, bytes(range(256)) * 100),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYQUANT_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned, "_remarks", [])
    return tmp_path


@pytest.mark.parametrize("name", PLANTS)
def test_what_lies_in_the_cache_is_left_out_with_a_remark(
    name: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PLANTS[name](cache / tuned.FILE)
    table = tuned.load()
    assert table == tuned.parse(tuned.PACKAGED.read_bytes(), "packaged")
    if name == "an unreadable file" and os.geteuid() == 0:
        return  # root reads it; what it holds is refused all the same
    assert tuned._remarks, name
    assert any("measured kernel choices" in record.message for record in caplog.records)


@pytest.mark.parametrize("cache_path", ["/dev/null", "/proc/self/mem/x", "x" * 5000, "~", "/nonexistent/\u00e9"])
def test_the_cache_may_be_no_folder_at_all(cache_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYQUANT_CACHE", cache_path)
    tuned.load()


def test_whatever_goes_wrong_is_a_remark_at_import(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(table: tuned.Table) -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "planted")

    monkeypatch.setattr(tuned, "activate", broken)
    tuned.activate_found()
    assert any("planted" in line for line in tuned._remarks)


def test_import_survives_the_worst_of_them_and_a_machine_without_a_home(tmp_path: Path) -> None:
    """In fresh processes: a pipe (it hung), 401 digits (OverflowError), no HOME and no entry for the user."""
    program = (
        "import os, pwd, sys, signal; signal.alarm(100)\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "import pyquant, torch\n"
        "print(pyquant.QLinear.__name__)\n"
    )
    base = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "PYQUANT_CACHE")}
    base |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    runs = []
    for name in ("a pipe", "a number of 401 digits", None):
        environment = dict(base)
        if name is not None:
            folder = tmp_path / name.replace(" ", "_")
            folder.mkdir()
            PLANTS[name](folder / tuned.FILE)
            environment["PYQUANT_CACHE"] = str(folder)
        command = [sys.executable, "-c", program]
        runs.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for run in runs:
        out, error = run.communicate(timeout=200)
        assert (run.returncode, out) == (0, "QLinear\n"), error
        assert "measured kernel choices" in error


def test_the_users_choices_win_over_the_packages(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged, own = tuned.Table(), tuned.Table()
    packaged.add("GPU X", [replace(CHOICE, row="gemm_package"), replace(CHOICE, m=128, row="gemm_other")], {"by": "us"})
    own.add("GPU X", [replace(CHOICE, row="gemm_user")], {"by": "user"})
    (cache / "packaged.json").write_bytes(tuned.dumps(packaged))
    (cache / tuned.FILE).write_bytes(tuned.dumps(own))
    monkeypatch.setattr(tuned, "PACKAGED", cache / "packaged.json")
    found = tuned.load()
    assert {c.m: c.row for c in found.gpus["GPU X"].values()} == {64: "gemm_user", 128: "gemm_other"}
    assert found.notes["GPU X"] == {"by": "user"}
