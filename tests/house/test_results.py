"""Results that are kept beside the code stay small enough to be read, and differ row by row."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pyquant.io import strict_json

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 6100  # 1700 of them a GPU's layers and kernels, which goals and bench.rows_again read


def committed() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "*.json"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git repository")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def test_committed_json_has_few_lines() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_bytes().count(b"\n") for path in committed()}
    assert len(lines) > 10
    assert sum(lines.values()) <= MOST_LINES, sorted(lines.items(), key=lambda entry: -entry[1])[:5]


def test_committed_results_are_written_as_we_write_them_now() -> None:
    results = [path for path in committed() if path.is_relative_to(ROOT / "bench/results")]
    assert results
    differing = [path for path in results if strict_json.compact(json.loads(path.read_bytes())) != path.read_bytes()]
    assert not differing, "write them with pyquant.io.strict_json.compact"
