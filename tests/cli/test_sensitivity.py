"""pyquant sensitivity: the cost first, the table, the skip list, files that equal the Python call; errors by name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import pyquant
from pyquant.cli.main import main
from pyquant.report.records.record import load_record
from pyquant.report.records.sensitivity import SensitivityReport

SOURCE = """
import torch
from torch import nn

def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))

def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        yield torch.randn(8, 16, generator=generator)

def held_out():
    return list(batches(2))

def accuracy(model):
    x = torch.cat(list(batches(5)))
    return (model(x).argmax(-1) == build()(x).argmax(-1)).float().mean()

NUMBER = 3

def one():
    return 1
"""
WORDS = ["sensitivity", "toy_net:build", "--data", "toy_net:batches", "--batches", "3"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_net.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_net", raising=False)
    return tmp_path


def test_it_says_the_cost_measures_and_writes_what_python_finds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take seconds; they have own tests
    words = [*WORDS, "--held-out", "toy_net:held_out", "--max-drop", "1e-9", "--out", "o", "--journal", "j.jsonl"]
    assert main(words) == 0
    shown = capsys.readouterr()
    first = shown.out.splitlines()[0]
    assert first == "cost: 6 evaluations: 21 forward passes, 6 forward passes before, to calibrate"
    assert "sensitivity: 6/6" in shown.err
    assert "skip for int4, predicted drop of the rest <= 1e-09 (nats per row): 0, 2, 4" in shown.out
    import toy_net

    expected = pyquant.sensitivity(toy_net.build().eval(), toy_net.batches(), num_batches=3, batches=toy_net.held_out())
    found = load_record("o/sensitivity.json")
    assert isinstance(found, SensitivityReport)
    assert found == expected
    assert {p.name for p in Path("o").iterdir()} == {f"sensitivity.{e}" for e in ("json", "md", "csv")}
    saved = Path("o/sensitivity.json").read_bytes()
    assert main(words) == 0
    assert Path("o/sensitivity.json").read_bytes() == saved
    assert main(["report", "o/sensitivity.json", "--out", "again", "--format", "md", "csv"]) == 0
    assert Path("again/sensitivity.md").read_bytes() == Path("o/sensitivity.md").read_bytes()


def test_the_users_metric_decides_about_the_skip_list(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--eval", "toy_net:accuracy", "--mode", "cumulative", "--by", "task", "--max-drop", "1"]
    assert main([*words, "--formats", "fp32,W4A8Dynamic(group_size=8)"]) == 0
    out = capsys.readouterr().out
    assert "skip for W4A8Dynamic(group_size=8), measured drop of the rest <= 1 (metric): nothing" in out
    assert "calls of eval_fn" in out.splitlines()[0]
    assert re.search(r"everything in +\| loss +\| metric", out)
    assert re.search(r"fp32 +\| +0 +\| +1 ", out)  # agreement of the float model with itself
    assert main([*WORDS, "--metric", "eval", "--eval", "toy_net:accuracy", "--lower-is-better"]) == 0


def test_errors_name_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        ("--metric eval", "--eval"),
        ("--by task --max-drop 1", "--by"),
        ("--formats fp32", "formats"),
        ("--held-out toy_net:one", "--held-out"),
        ("--metric fisher --mode leave-one-out", "leave_one_out"),
        ("--eval toy_net:NUMBER", "--eval"),
        ("--max-drop -1", "--max-drop"),
        ("--batches 9", "argument '--batches': got 9"),
    ):
        assert main([*WORDS, *words.split()]) == 2, words
        shown = capsys.readouterr()
        assert text in shown.err
        if words.startswith(("--max-drop", "--batches")):
            assert shown.out == "", words  # before the cost is told, and anything measured
    Path("j.jsonl").write_text("{}\n")
    assert main([*WORDS, "--journal", "j.jsonl"]) == 1
    assert "j.jsonl" in capsys.readouterr().err


def test_latency_stands_beside_the_losses(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["toy_net:build", "--data", "toy_net:batches", "--batches", "3", "--formats", "int8,int4"]
    assert main(["latency", *words, "--rounds", "2", "--held-out", "0", "--out", "l.json"]) == 0
    assert main(["sensitivity", *words, "--latency", "l.json", "--out", "o"]) == 0
    capsys.readouterr()
    report = load_record("o/sensitivity.json")
    table = load_record("l.json")
    assert report.latency is not None
    assert report.formats == table.formats == ("fp32", "int8", "int4")
    assert main(["sensitivity", *words[:5], "--formats", "int8", "--latency", "l.json"]) == 1
    assert "formats" in capsys.readouterr().err
