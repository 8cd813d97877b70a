"""Rows that the device at hand cannot run, on the simulator's other device: the kernel tests again, in a process whose
simulator is an A100 (int4 tensor cores, which Hopper lacks)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import simulator

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
SM = 80


def _only_there() -> list[str]:
    here = NATIVE.device_info(0)["sm"]
    return [
        row["name"]
        for row in NATIVE.kernel_table()
        if row["compiled"] and row["sm_min"] <= SM < row["sm_end"] and not row["sm_min"] <= here < row["sm_end"]
    ]


def test_rows_of_an_older_chip_on_a_simulated_one() -> None:
    if simulator.runtime is None:
        pytest.skip(f"no simulator: {simulator.why_not}")
    names = _only_there()
    if not names:
        pytest.skip("every compiled row for compute capability 8.0 runs on the device at hand")
    folder = Path(__file__).parent.parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "../pyproject.toml",
        "--rootdir",
        "..",
        "-p",
        "no:cacheprovider",
        "-q",
        "gpu/test_gemm.py",
        "-k",
        " or ".join(names),
    ]
    ran = subprocess.run(
        command, cwd=folder, env={**os.environ, "PTXSIM_DEVICE": "a100"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    outputs = sum(len(row["out"]) for row in NATIVE.kernel_table() if row["name"] in names)
    assert passed, ran.stdout
    assert int(passed[1]) > 4 * outputs, ran.stdout  # four modes of every output type, and the single launches
