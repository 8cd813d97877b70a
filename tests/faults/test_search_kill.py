"""Searches that are killed at any moment: resumed, they end with the same plan, byte for byte."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import problems
import pytest
from children import Interrupter, die, die_half_way, fork, wait
from search_problems import decreasing

from pyquant.mixed_precision.solve import search_front

PROBLEM = decreasing(3)
BUDGET = 6
# Few for every change, besides those at each call, which find what is wrong at any one place.
KILLS = [16, pytest.param(64, marks=pytest.mark.nightly)]


def _search(directory: Path, pause: float = 0.0) -> str:
    """A search in which every evaluation leaves a mark. -> its points, as text."""
    count = directory / "evaluations"

    def evaluate(config: tuple[int, ...]) -> float:
        with count.open("a") as file:
            file.write("x")
        time.sleep(pause)
        return PROBLEM.loss_of(config) * (1.0 + 0.1 * sum(config) / 3)

    return repr(search_front(PROBLEM, evaluate, BUDGET, journal=directory / "journal", stop_gain=0.0))


def _undisturbed(directory: Path) -> tuple[str, bytes]:
    directory.mkdir()
    return _search(directory), (directory / "journal").read_bytes()


@pytest.mark.parametrize("wanted", KILLS)
def test_killed_at_random_instants(wanted: int, tmp_path: Path) -> None:
    plan, journal = _undisturbed(tmp_path / "undisturbed")
    start = time.monotonic()
    assert wait(fork(lambda: _search(tmp_path, 0.001))) == 0
    longest = time.monotonic() - start
    rng = random.Random(problems.BASE_SEED)
    kills = rounds = 0
    while kills < wanted:
        directory = tmp_path / f"round{rounds}"
        directory.mkdir()
        killed_here = 0
        while True:
            pid = fork(lambda d=directory: _search(d, 0.001))  # type: ignore[misc]
            time.sleep(rng.uniform(0.0, longest))
            os.kill(pid, signal.SIGKILL)
            if wait(pid) == 0:
                break
            killed_here += 1
            if killed_here >= 20:
                break
        assert _search(directory) == plan
        assert (directory / "journal").read_bytes() == journal
        # at most one evaluation repeated for each kill
        assert BUDGET <= (directory / "evaluations").stat().st_size <= BUDGET + killed_here
        kills, rounds = kills + killed_here, rounds + 1
    assert rounds >= 2


@pytest.mark.parametrize("half", [False, True], ids=["before", "half way"])
def test_killed_at_each_call(half: bool, tmp_path: Path) -> None:
    plan, journal = _undisturbed(tmp_path / "undisturbed")
    code, k = -signal.SIGKILL, 0
    while code != 0:
        directory = tmp_path / f"at{k}"
        directory.mkdir()

        def work(directory: Path = directory, k: int = k) -> None:
            with Interrupter(k, die_half_way if half else die):
                _search(directory)

        code = wait(fork(work))
        assert code in (0, -signal.SIGKILL)
        assert _search(directory) == plan
        assert (directory / "journal").read_bytes() == journal
        k += 1
    assert k > 2 * BUDGET  # every evaluation writes and flushes
