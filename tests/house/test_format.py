"""One formatter decides how Python looks: no line of the repository asks it to look away."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = ("fmt: " + "skip", "fmt: " + "off", "yapf: " + "disable")


def test_no_line_is_kept_from_the_formatter() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]
    assert len(paths) > 500
    assert [str(path) for path in paths if any(word in path.read_text() for word in EXCEPTIONS)] == []
