"""A pytest plugin: tests that ended in an earlier run are left out, and a run that is out of time stops and says so.

    python -m pytest -p bench.gpu.resume --done FILE [--time-budget S] ...

FILE holds a line for each test that began and for its outcome, written at once, so that a killed run goes on behind
what it had done; a line that was being written then is forgotten. A test that began in three runs and ended in none
has hung, and counts as failed. Exit code: 75 when tests are left, else 1 when any test failed in this run or an earlier
one, else pytest's own. It works with pytest-xdist, whose controller alone writes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

UNFINISHED_TESTS: Final = 75
MOST_BEGUN: Final = 3
BEGUN, PASSED, FAILED = "begun", "passed", "failed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("going on with a run")
    group.addoption("--done", metavar="FILE", help="outcomes of tests, which are not run again")
    group.addoption("--time-budget", type=float, metavar="S", help="stop after S seconds; exit code 75")


def pytest_configure(config: pytest.Config) -> None:
    if worker := getattr(config, "workerinput", None):
        config.pluginmanager.register(_LeaveOut(set(worker["pyquant_done"])), "pyquant-leave-out")
    elif config.getoption("--done"):
        outcomes = Outcomes(Path(config.getoption("--done")))
        config.pluginmanager.register(_LeaveOut(set(outcomes.ended)), "pyquant-leave-out")
        config.pluginmanager.register(_Controller(outcomes, config.getoption("--time-budget")), "pyquant-resume")


class Outcomes:
    """The file: ended, {test: passed or failed}, of all runs so far. Tests that hung are among the failed ones."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = [entry for line in path.read_bytes().split(b"\n") if (entry := _entry(line))] if path.exists() else []
        begun = Counter(test for test, what in entries if what == BEGUN)
        self.ended = {test: what for test, what in entries if what != BEGUN}
        self.hung = [test for test, times in begun.items() if times >= MOST_BEGUN and test not in self.ended]
        self._file = path.open("a")
        self._file.write("\n" if entries else "")  # behind a line that was being written
        for test in self.hung:
            self.add(test, FAILED)

    def add(self, test: str, what: str) -> None:
        """The system has the line when this returns: it outlives this process."""
        self._file.write(json.dumps([test, what]) + "\n")
        self._file.flush()
        if what != BEGUN:
            self.ended[test] = what


def _entry(line: bytes) -> tuple[str, str] | None:
    try:
        test, what = json.loads(line)
    except ValueError:
        return None
    return str(test), str(what)


def forget_failed(path: Path) -> None:
    """Tests that failed will be run again."""
    if path.exists():
        passed = [test for test, what in Outcomes(path).ended.items() if what == PASSED]
        fresh = path.with_name(path.name + ".new")
        fresh.write_text("".join(json.dumps([test, PASSED]) + "\n" for test in passed))
        fresh.replace(path)


class _LeaveOut:
    """Deselects tests; the controller and every process of a distributed run the same ones."""

    def __init__(self, done: set[str]) -> None:
        self.done = done

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        ended = [item for item in items if item.nodeid in self.done]
        if ended:
            items[:] = [item for item in items if item.nodeid not in self.done]
            config.hook.pytest_deselected(items=ended)


class _Controller:
    def __init__(self, outcomes: Outcomes, budget: float | None) -> None:
        self.outcomes, self.before = outcomes, frozenset(outcomes.ended)
        self.deadline = None if budget is None else time.monotonic() + budget
        self.failed_now: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["pyquant_done"] = sorted(self.before)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            pytest.exit("the time is over; the same command goes on", returncode=UNFINISHED_TESTS)
        self.outcomes.add(nodeid, BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed_now.add(report.nodeid)
        if report.when == "teardown" or (report.failed and report.when == "???"):  # ???: its process died
            self.outcomes.add(report.nodeid, FAILED if report.nodeid in self.failed_now else PASSED)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nothing left to run is no failure of a run that goes on, but its failures are."""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and self.before:
            failed = any(what == FAILED for what in self.outcomes.ended.values())
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.before:
            failed = [test for test in sorted(self.before) if self.outcomes.ended[test] == FAILED]
            terminalreporter.write_line(f"{len(self.before)} tests ended in earlier runs, {len(failed)} of them failed")
            for test in failed:
                terminalreporter.write_line(f"failed before: {test}{' (it hung)' * (test in self.outcomes.hung)}")
