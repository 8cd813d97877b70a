"""keep_freed_memory(): takes hold in a process of its own, and says so where it cannot."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from pyquant.measure.memory import keep_freed_memory

PROGRAM = """
import resource, sys
from pyquant.measure.memory import keep_freed_memory
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
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1000  # 5 x 48 MiB would be 60 000 faults of 4 KiB


def test_another_c_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False
