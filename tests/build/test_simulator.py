"""What `make test` runs the CUDA kernels on, and that `make simulator` says why it cannot: make without executing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = f"{ROOT}/build/ptxsim/libcudart.so.13"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def machine(folder: Path, nvcc: str | None = "13.0", gxx: str | None = "12", gpu: bool = False) -> Path:
    """A folder to be the whole PATH: what there is on a machine with such an nvcc and g++."""
    folder.mkdir()
    for tool in ("sh", "make", "find", "grep", "sed", "cut", "uname", "env", "getconf", "git", "mkdir"):
        if path := shutil.which(tool):
            (folder / tool).symlink_to(path)
    scripts = {"nvidia-smi": "echo GPU 0" if gpu else "exit 9"}
    if nvcc:
        scripts["nvcc"] = f"echo 'Cuda compilation tools, release {nvcc}, V{nvcc}.1'"
    if gxx:
        says = "echo 'Free Software Foundation'"
        scripts["g++"] = f'case "$1" in -dumpversion) echo {gxx};; *) {says};; esac'
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def make(path: Path, *words: str, **named: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not re.match(r"PYQUANT_|MAKE|MFLAGS|VIRTUAL_ENV|CXX", k)}
    environment = {**kept, "PATH": str(path), **named}
    words = (*words, f"VENV={path.parent / 'venv'}")  # in which nothing is built yet
    return subprocess.run(["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def simulator_of(path: Path, target: str, **named: str) -> tuple[str, bool]:
    """What the tests are told to run kernels on, and whether our simulator's suite goes before."""
    changed = "tools/ptxsim/tests/conftest.py"  # as if the simulator's suite had not passed since
    told = make(path, "-n", "-W", changed, target, **named).stdout
    ((flavour, simulator),) = re.findall(
        r'PYQUANT_SIMULATOR=(ON|OFF).*cd tests && PYQUANT_CUDART_SIM="(.*?)"', told, re.S
    )
    assert flavour == ("ON" if simulator else "OFF")
    return simulator, "cd tools/ptxsim" in told


needs_this_processor = pytest.mark.skipif(
    os.uname().machine != "x86_64" or " avx2 " not in Path("/proc/cpuinfo").read_text(),
    reason="the simulator needs x86-64 with AVX2",
)


@needs_this_processor
@pytest.mark.parametrize("target", ["test", "test-kernels", "nightly-tests"])
def test_where_kernels_are_compiled_they_run(tmp_path: Path, target: str) -> None:
    assert simulator_of(machine(tmp_path / "bin"), target) == (OURS, True)


@pytest.mark.parametrize(
    "without", [{"nvcc": None}, {"nvcc": "12.8"}, {"gxx": "11"}, {"gxx": None}, {"gpu": True}], ids=str
)
def test_without_nvcc_or_with_a_gpu_there_is_no_simulator(tmp_path: Path, without: dict) -> None:
    assert simulator_of(machine(tmp_path / "bin", **without), "test") == ("", False)


@pytest.mark.parametrize("named", ["", "/opt/other/libcudart.so.13"])
def test_the_caller_s_own_goes_first(tmp_path: Path, named: str) -> None:
    assert simulator_of(machine(tmp_path / "bin"), "test", PYQUANT_CUDART_SIM=named) == (named, False)


@pytest.mark.parametrize(
    ("without", "words"),
    [({"nvcc": None}, "no nvcc in PATH"), ({"nvcc": "12.8"}, "release 12.8"), ({"gxx": "11"}, "g[+][+] is 11")],
    ids=str,
)
@needs_this_processor
def test_make_simulator_says_why_not(tmp_path: Path, without: dict, words: str) -> None:
    done = make(machine(tmp_path / "bin", **without), "simulator")
    assert done.returncode != 0
    assert re.search(f"cannot be built here: .*{words}", done.stdout), done.stdout + done.stderr
