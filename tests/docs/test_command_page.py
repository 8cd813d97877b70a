"""Every command of docs/cli.md that needs neither a GPU nor minutes, in the page's order, in a fresh process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fresh import ROOT, python

sys.path.insert(0, str(Path(__file__).parent))
import command_page

PAGE = ROOT / "docs" / "cli.md"


def test_the_page_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    script = Path(command_page.__file__).read_text(encoding="utf-8")
    done = python(f"from pathlib import Path\nPAGE = Path({str(PAGE)!r})\n{script}", tmp_path)
    assert len(done) >= 12
    assert [command for command, code in done if code != 0] == []
    recorded = json.loads((tmp_path / "quantised/config.json").read_bytes())["quantization_config"]["pyquant"]
    assert len(recorded["recipe_sha256"]) == 64


def test_commands_are_found_in_order_and_joined(tmp_path: Path) -> None:
    page = tmp_path / "p.md"
    page.write_text("pyquant no\n```\npyquant a \\\n    --b\nother\npyquant c\n```\n")
    assert command_page.commands(page) == ["pyquant a --b", "pyquant c"]
