"""That processes which make starts keep what Python compiled, also where it may not lie beside the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = f"{ROOT}/build/bytecode"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {}),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, {"PYTHONPYCACHEPREFIX": OURS}),
        ({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/there"}, {"PYTHONPYCACHEPREFIX": "/there"}),
        ({"PYTHONPYCACHEPREFIX": "/there"}, {"PYTHONPYCACHEPREFIX": "/there"}),
    ],
    ids=["beside", "not beside", "not beside, but elsewhere", "elsewhere"],
)
def test_where_bytecode_lies(given: dict[str, str], told: dict[str, str]) -> None:
    names = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    kept = {key: value for key, value in os.environ.items() if key not in (*names, "MAKEFLAGS", "MFLAGS")}
    words = ["make", "--no-print-directory", "-s", "--eval", "told:; @env", "told"]
    done = subprocess.run(words, cwd=ROOT, env=kept | given, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith(names))
    assert found == told
