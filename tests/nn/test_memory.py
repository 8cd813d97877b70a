"""What a layer takes of memory while it is quantised: a matrix may be most of what there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyquant import ops

PEAK = """
import re, sys
from pathlib import Path
import torch, pyquant
from torch import nn

def status(word):
    return int(re.search(word + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def peak(n, k):
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    pyquant.quantize_(model, sys.argv[1])
    return status("VmHWM") - before

peak(256, 512)  # what a first use loads
print(peak(4096, 16384))
"""
MIB = 128  # of the float weight: 64 of int8 codes


@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        ("W8A8Dynamic", 64 + 64),  # codes, and packed
        ("W8A16", 64),
        ("W4A16", 64 + 32),
        ("W4A8Dynamic(group_size=128)", 64 + 32 + 32),
        ("FP16", 128),  # float16 of bfloat16
    ],
)
def test_a_weight_is_not_widened_as_a_whole(scheme: str, most: int) -> None:
    """As float32 it has 256 MiB, and half of that again where each number is asked whether it is finite."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is measured on Linux")
    if not ops.native_available():
        pytest.skip(f"compiled library not in use: {ops.why_not_native()}")
    # glibc would keep what was let go: what is in use is asked for
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, scheme]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    grown = float(done.stdout)
    assert grown < most + 64, f"{grown} MiB beside the {MIB} of the float weight"
