"""docs/reliability.md names a test for every goal, and those tests exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOALS = [f"C{number:02}" for number in range(1, 29)] + ["G18", "G19", "G20"]


def rows(text: str) -> dict[str, list[str]]:
    return {
        cells[0].strip(): [cell.strip() for cell in cells[1:-1]]
        for line in text.splitlines()
        if re.match(r"\| [CG][0-9]{2} \|", line)
        for cells in [line.removeprefix("|").split("|")]
    }


def missing(text: str) -> list[str]:
    """What the table lacks: goals, tests that are not there, rows with neither test nor reason."""
    found = rows(text)
    wrong = [goal for goal in GOALS if goal not in found]
    for goal, (_, held_by, remark) in found.items():
        names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", held_by)
        if not names and not remark:
            wrong.append(f"{goal}: neither a test nor a reason")
        for file, function in names:
            path = ROOT / file
            if not path.is_file() or not re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE):
                wrong.append(f"{goal}: {file}::{function} is not there")
    return wrong


def test_every_goal_is_held_by_a_test_or_has_its_reason() -> None:
    assert missing((ROOT / "docs" / "reliability.md").read_text()) == []


def test_a_test_that_is_gone_is_seen() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert missing(text.replace("::test_opcheck`", "::test_gone`")) == [
        "C09: tests/ops/test_opcheck.py::test_gone is not there"
    ]
    assert missing(text.replace("| C24 ", "| D24 ")) == ["C24"]


@pytest.mark.parametrize(("body", "code"), [("pytest.skip('no')", pytest.ExitCode.NO_TESTS_COLLECTED), ("pass", 0)])
def test_a_run_in_which_everything_is_skipped_fails(tmp_path: Path, body: str, code: int) -> None:
    """The plug-in of tests/conftest.py, over a suite of one test."""
    (tmp_path / "test_one.py").write_text(f"import pytest\n\ndef test_one():\n    {body}\n")
    text = (ROOT / "tests" / "conftest.py").read_text()
    parts = {part.name: part for part in ast.parse(text).body if isinstance(part, (ast.ClassDef, ast.FunctionDef))}
    plugin = "\n\n".join(str(ast.get_source_segment(text, parts[name])) for name in ("Executed", "pytest_configure"))
    (tmp_path / "conftest.py").write_text(f"from __future__ import annotations\nimport pytest\n\n{plugin}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "-c", "/dev/null", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("shows nothing and counts as failed" in done.stdout) == bool(code)
