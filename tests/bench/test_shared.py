"""What drivers share: names of folders, means, and an allocator that takes hold in a process of its own."""

from __future__ import annotations

import argparse
import ctypes
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.shared import (  # noqa: E402
    check_counts,
    device_for,
    exit_code,
    folder_name,
    geometric_mean,
    keep_freed_memory,
    reason_of,
)
from pyquant.errors import ArgumentError, UnsupportedError  # noqa: E402
from pyquant.measure.environment import describe_environment  # noqa: E402

PROGRAM = """
import resource, sys
from bench.shared import keep_freed_memory
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [torch.ones(1 << 20) for _ in range(12)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_no_page_faults_once_memory_is_kept() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1000  # 5 x 48 MiB would be 60 000 faults of 4 KiB


def test_another_c_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False


def test_folder_names_are_plain() -> None:
    gpu = replace(describe_environment("cpu"), gpu="NVIDIA H200, sm_90, 132 SMs")
    assert folder_name(gpu) == "nvidia-h200"
    environment = replace(describe_environment("cpu"), cpu="Intel(R) Xeon(R) Processor @ 2.0GHz", gpu="")
    assert folder_name(environment) == "cpu-intel-xeon-processor-2-0ghz"


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(ArgumentError):
            geometric_mean(bad)


def test_counts_below_one_are_named() -> None:
    check_counts(argparse.Namespace(m=[1, 2], rounds=1), "m", "rounds")
    for wrong, named in ((argparse.Namespace(m=[1, 0]), "m"), (argparse.Namespace(rounds=-1), "rounds")):
        with pytest.raises(ArgumentError, match=f"--{named}"):
            check_counts(wrong, named)


def test_a_reason_is_one_line() -> None:
    assert reason_of(RuntimeError("\n first \nsecond")) == "first "
    assert reason_of(KeyError()) == "KeyError"


def test_without_a_gpu_only_a_dry_run_has_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str] | None) -> int:
        return len(device_for(argv[0] if argv else None))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert exit_code("bench.x", run, None) == len("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert exit_code("bench.x", run, ["faked"]) == len("cpu")
    assert exit_code("bench.x", run, ["cuda-graph"]) == 2
    assert capsys.readouterr().err == "bench.x: torch sees no CUDA device\n"
    with pytest.raises(UnsupportedError):
        device_for(None)
