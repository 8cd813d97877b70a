"""The table of docs/distributed.md: the bytes that a process holds are those that the command prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def of_the_page() -> list[list[str]]:
    """Rows [scheme, processes, bytes by way of sharing ...]; the page says a scheme once."""
    lines = (ROOT / "docs" / "distributed.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| MiB a process | processes |"))
    rows: list[list[str]] = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return rows
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append([cells[0] or rows[-1][0], *cells[1:]])
    return rows


@pytest.mark.nightly
def test_the_table_of_the_page_comes_out_again() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bench.sharding"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    printed = [[cell.strip() for cell in line.strip("|").split("|")] for line in ran.stdout.splitlines()[2:]]
    assert len(printed) == 6
    assert sorted(printed) == sorted(of_the_page())
