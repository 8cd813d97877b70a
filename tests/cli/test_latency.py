"""pyquant latency measures, prints and saves what pyquant report draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import toy

from pyquant.cli.main import main
from pyquant.report.records.latency import LatencyTable

MODEL = "toy_latency:build"
DATA = """
def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        yield torch.randint(0, 20, (2, 6), generator=generator)

def no_batches():
    return 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_latency.py").write_text(toy.SOURCE + DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_latency", raising=False)
    return tmp_path


def test_a_table_is_printed_saved_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["latency", MODEL, "--data", "toy_latency:batches", "--rounds", "2", "--held-out", "2", "--threads", "1"]
    assert main([*words, "--formats", "fp32", "int8", "W4A8Dynamic(group_size=32)", "--out", "found.json"]) == 0
    shown = capsys.readouterr()
    table = LatencyTable.load("found.json")
    assert table.groups == ("1", "3")
    assert table.formats == ("fp32", "int8", "W4A8Dynamic(group_size=32)")
    assert (table.clock, table.rounds, len(table.held_out)) == ("cpu", 2, 2)
    assert "everything else" in shown.out
    assert "latency: 2/2 rounds" in shown.err
    assert main(["report", "found.json", "--out", "drawn", "--format", "md", "csv"]) == 0
    assert Path("drawn/found.md").read_text() in shown.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--data", "toy_latency:no_batches"], "'--data'"),
        (["--data", "toy_latency:batches", "--out", "table.txt"], "'--out'"),
        (["--data", "toy_latency:batches", "--formats", "fp32"], "'--formats'"),
        (["--data", "toy_latency:batches", "--rounds", "0"], "'--rounds'"),
        (["--data", "toy_latency:batches", "--clock", "sundial"], "'--clock'"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", MODEL, *words]) == 2
    assert text in capsys.readouterr().err
    assert not list(Path().glob("*.json"))
