"""No folder of tests is left out of a run by its name."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_every_folder_of_tests_is_walked(request: pytest.FixtureRequest) -> None:
    left_out = request.config.getini("norecursedirs")
    folders = {file.parent.name for file in TESTS.rglob("test_*.py")}
    assert {"build", "house"} <= folders
    assert not [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in left_out)]
