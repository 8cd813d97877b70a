"""What every test shares: the simulator hook, the seed line on failure, and a run of nothing is a failure."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# numpy's products are those of references alone. Its threads wait for each other in busy loops: where processes share
# the cores, a small product then takes ten times as long. Read when numpy is imported, by children too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

if os.environ.get("PYQUANT_CUDART_SIM"):
    import simulator  # noqa: F401  (first of all: it must load its libcudart before anything else loads one)

import problems
import sample
import torch

# Threads stay as torch sets them up: what users run. tests/threads runs fresh processes with other numbers.


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads; what was there before comes back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder_of_the_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of a distributed run: see made_once."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if hasattr(request.config, "workerinput") else own) / "made-once"


@pytest.fixture(scope="module", autouse=True)
def _threads_of_the_module() -> Iterator[None]:
    """No module leaves another number of threads to the next: a fixture of the module that does is named."""
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before, f"a fixture of this module left {after} threads, not {before}"


def _seed(*path: object) -> None:
    """torch's own generator: a test that draws from it (a fresh nn.Linear, torch.randn) draws the same wherever it runs
    and whatever ran before, so that a failure comes back with the line that is printed for it."""
    of_path = problems.Draw(problems.BASE_SEED, "torch", *path).generator.initial_seed()
    torch.random.default_generator.manual_seed(of_path)


@pytest.fixture(autouse=True)
def _own_seed(request: pytest.FixtureRequest) -> None:
    _seed(request.node.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """What tests share is made by whichever of them comes first in a process."""
    if fixturedef.scope != "function":
        _seed(fixturedef.baseid, fixturedef.argname, getattr(request, "param_index", 0))


@pytest.fixture(autouse=True)
def _threads_come_back() -> Iterator[None]:
    """No test leaves another number of threads to the next."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


def pytest_report_header() -> str:
    return f"seed: PYQUANT_TEST_SEED={problems.BASE_SEED}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        line = f"PYQUANT_TEST_SEED={problems.BASE_SEED} python -m pytest '{item.nodeid}'"
        report.sections.append(("repeat with", line))


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look through it again and again,
    half a second each time."""
    gc.collect()
    gc.freeze()


# Files that take longest, first: one that comes last is one that the other processes wait for.
LONGEST = (
    *("gpu/test_gemm.py", "gpu/test_quantize.py", "integrations/test_distributed.py", "docs/test_site.py"),
    *("bench/test_gpu_dry_run.py", "gpu/test_machine_code.py", "gpu/test_experts.py", "threads/test_processes.py"),
    *("integrations/test_onnx_models.py", "cli/test_main.py", "bench/test_drivers.py", "build/test_install.py"),
    *("support/test_mutants.py", "bench/test_lm.py", "integrations/test_transformers.py", "docs/test_tutorials.py"),
    *("faults/test_leaks.py", "gpu/test_weight_only.py", "faults/test_save_faults.py", "hostile/test_documents.py"),
    *("ops/test_invariance.py", "integrations/test_transformers_memory.py", "integrations/test_peft.py"),
)
_PLACES = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _PLACES.get(item.path, len(LONGEST)))
    if not sample.NIGHT:
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="nightly: runs with PYQUANT_NIGHTLY=1 (make nightly)"))


class Executed:
    """Counts tests whose body ran: a run in which everything was skipped shows nothing. Names a failed one at once: a
    run that is stopped from outside never comes to its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.count = 0
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and not report.skipped
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(report.longrepr) if crash is None else crash.message
            reporter.ensure_newline()
            reporter.write_line(f"\n{report.nodeid}: {why}".strip().splitlines()[0][:400], red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.count == 0 and session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
            reporter = session.config.pluginmanager.get_plugin("terminalreporter")
            if reporter is not None:
                reporter.write_line("no test was executed: this run shows nothing and counts as failed", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of a distributed run reports to its controller
        config.pluginmanager.register(Executed(config), "pyquant-executed")
