"""Quotients that CUDA kernels find without dividing, also of numbers and by divisors beyond 2^31 and 2^32."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SWEEP = Path(__file__).with_name("divisor_sweep.cpp")
HEADER = ROOT / "csrc/cuda/divisor.cuh"
MUTANTS = {
    "a factor that is one less": ("(high << 32 | half(rest)) + 1", "(high << 32 | half(rest))"),
    "half of the factor": ("factor = (high << 32 | half(rest)) + 1", "factor = (high << 32) + 1"),
    "a shift of 32 bits at most": ("shift < 63 &&", "shift < 32 &&"),
    "32-bit numbers": ("static_cast<uint64_t>(n);", "static_cast<uint32_t>(n);"),
    "no addition": ("__umul64hi(number, factor) + number", "__umul64hi(number, factor)"),
}


def _run(folder: Path, *include: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "sweep"
    folders = [f"-I{path}" for path in (*include, ROOT / "csrc")]
    subprocess.run(["g++", "-std=c++17", "-O2", *folders, str(SWEEP), "-o", str(program)], check=True, timeout=300)
    return subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)


def test_quotients_are_those_of_the_machine(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"compared=(\d+)", done.stdout)[1]) > 5 * 10**6  # type: ignore[index]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_caught(mutant: str, tmp_path: Path) -> None:
    old, new = MUTANTS[mutant]
    text = HEADER.read_text()
    assert text.count(old) == 1
    changed = tmp_path / "include/cuda/divisor.cuh"
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace(old, new))
    done = _run(tmp_path, tmp_path / "include")
    assert done.returncode != 0, "planted bug survived"
