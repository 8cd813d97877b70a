"""bench.gpu.resume: tests that ended are not run again, whatever ended the run, and no failure is forgotten."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu.resume import BEGUN, FAILED, MOST_BEGUN, PASSED, UNFINISHED_TESTS, Outcomes, forget_failed  # noqa: E402

TESTS = """
import os, pathlib, pytest
ran = pathlib.Path(os.environ["RAN"])
@pytest.mark.parametrize("i", range(6))
def test_it(i):
    with ran.open("a") as file:
        file.write(f"{i} ")
    if i == 2 and "KILL" in os.environ:
        os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), 9)
    assert i != 4 or "GOOD" in os.environ
"""
NO_XDIST = pytest.mark.skipif(not importlib.util.find_spec("xdist"), reason="pytest-xdist is not installed")
SPREAD = pytest.param(["-p", "xdist.plugin", "-n", "2"], marks=NO_XDIST)


def run(folder: Path, *words: str, **environment: str) -> tuple[int, list[int], str]:
    """-> the exit code, the tests that ran, what was printed."""
    (folder / "test_six.py").write_text(TESTS)
    (folder / "ran").write_text("")
    plugins = ["-p", "bench.gpu.resume", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    paths = {"PYTHONPATH": str(ROOT), "RAN": str(folder / "ran"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # TESTS kills the run that it is a part of: what this process is to its own run must not be taken for that.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "--done", str(folder / "done.jsonl"), *words, str(folder)],
        cwd=folder,
        env={**ours, **paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, sorted(map(int, (folder / "ran").read_text().split())), done.stdout + done.stderr


@pytest.mark.parametrize("spread", [[], SPREAD])
def test_a_killed_run_goes_on_and_its_failures_stay(tmp_path: Path, spread: list[str]) -> None:
    code, _, _ = run(tmp_path, *spread, KILL="1")
    assert code == -9
    ended = set(Outcomes(tmp_path / "done.jsonl").ended)
    code, ran, said = run(tmp_path, *spread)
    assert code == 1
    assert sorted([*ran, *(int(test[-2]) for test in ended)]) == [0, 1, 2, 3, 4, 5], "each test ends once"
    code, ran, said = run(tmp_path, *spread)
    assert (code, ran) == (1, [])
    assert "failed before: test_six.py::test_it[4]" in said


def test_failures_are_run_again_when_that_is_asked_for(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == 1
    forget_failed(tmp_path / "done.jsonl")
    assert run(tmp_path, GOOD="1")[:2] == (0, [4])
    assert run(tmp_path)[:2] == (0, [])


@pytest.mark.parametrize("spread", [[], SPREAD])
def test_a_run_that_is_out_of_time_stops_and_says_that_tests_are_left(tmp_path: Path, spread: list[str]) -> None:
    code, _, said = run(tmp_path, *spread, "--time-budget", "0")
    assert code == UNFINISHED_TESTS, said
    assert "goes on" in said
    assert run(tmp_path, *spread, "--time-budget", "600", GOOD="1")[0] == 0


def test_a_line_that_was_being_written_is_forgotten_and_a_test_that_hung_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "done.jsonl"
    lines = [["a", BEGUN], ["a", PASSED], *[["b", BEGUN]] * MOST_BEGUN, ["c", BEGUN], ["d", BEGUN]]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n["d", "pas')
    outcomes = Outcomes(path)
    assert outcomes.ended == {"a": PASSED, "b": FAILED}
    assert outcomes.hung == ["b"]
    outcomes.add("d", PASSED)
    assert Outcomes(path).ended == {"a": PASSED, "b": FAILED, "d": PASSED}
    forget_failed(path)
    assert Outcomes(path).ended == {"a": PASSED, "d": PASSED}
