"""The compiled library under sanitizers: random calls of every op through the bindings; the pool's loops on threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from csrc.cpu_engine import compile_one, compiler, link, objects
from problems import BASE_SEED
from sanitizers import random_calls
from sanitizers.build import ROOT, runtimes, sanitized_package

HERE = Path(__file__).parent
CALLS = 20_000

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if runtimes("asan", "ubsan") is None:
        pytest.skip("the compiler has no sanitizer libraries")
    return sanitized_package(tmp_path_factory.mktemp("sanitized"))


def run(package: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = (package, ROOT / "tests", ROOT / "tests/support")
    environment = {k: v for k, v in os.environ.items() if k != "PYQUANT_CUDART_SIM"} | {
        "LD_PRELOAD": str(runtimes("asan", "ubsan")),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_WAIT_POLICY": "passive",
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=package, capture_output=True, text=True, check=False
    )


@pytest.mark.nightly
def test_random_calls_of_every_op_touch_nothing_they_should_not(package: Path) -> None:
    done = run(package, str(HERE / "random_calls.py"), str(CALLS), str(BASE_SEED))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-6000:]


def test_the_program_of_random_calls_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Without sanitizers, in this process: a nightly run must not end by a mistake of its own program."""
    random_calls.main(3000, BASE_SEED)
    assert "executed" in capsys.readouterr().out


OVERRUN = """
import ctypes, sys, torch
from pathlib import Path
import pyquant
core = ctypes.CDLL(str(Path(pyquant.__file__).parent / "lib" / "libpyquant_core.so"))
pack = core["_ZN7pyquant3cpu9pack_int4EPKallPh"]
q, packed = torch.zeros(64, dtype=torch.int8), torch.zeros(31, dtype=torch.uint8)
pack(ctypes.c_void_p(q.data_ptr()), ctypes.c_int64(1), ctypes.c_int64(4096), ctypes.c_void_p(packed.data_ptr()))
"""


@pytest.mark.nightly
def test_the_build_reports_an_overrun(package: Path) -> None:
    """Without this, a build in which nothing is checked would pass."""
    done = run(package, "-c", OVERRUN)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted race"])
def test_threads_of_the_pool_do_not_race(tmp_path_factory: pytest.TempPathFactory, planted: bool) -> None:
    folder = tmp_path_factory.getbasetemp() / "thread_sanitizer"
    if runtimes("tsan") is None:
        pytest.skip("the compiler has no thread sanitizer")
    flags = ("-O1", "-g1", "-fsanitize=thread")
    if not folder.exists():
        folder.mkdir()
        objects(folder, HERE / "pool_race.cpp", flags)
    parts = sorted(folder.glob("*.o"))
    if planted:
        (folder / "planted").mkdir()
        compiled = compile_one(HERE / "pool_race.cpp", folder / "planted", (*flags, "-DPLANT_RACE"))
        parts = [compiled, *(p for p in parts if p.stem != "pool_race")]
    program = link(folder / f"pool_race_{planted}", parts, *flags)
    done = subprocess.run(
        [str(program)], capture_output=True, text=True, check=False, env={**os.environ, "TSAN_OPTIONS": "exitcode=66"}
    )
    assert done.returncode == (66 if planted else 0), done.stdout[-1000:] + done.stderr[-6000:]
    assert ("data race" in done.stderr) == planted
