"""`pyquant bench calib`: files, table, exit code and the picture. No timed assertion."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from pyquant.bench import calib
from pyquant.cli.main import main
from pyquant.measure.timing import default_clock


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small data sets instead of five large ones."""
    whole = calib.calib_data
    monkeypatch.setattr(calib, "DATA", ("gaussian", "relu_gaussian"))
    monkeypatch.setattr("pyquant.report.calibration_bench.CALIBRATION_DATA", ("gaussian", "relu_gaussian"))
    monkeypatch.setattr(calib, "calib_data", lambda kind: whole(kind)[:2, :8])
    monkeypatch.setattr(calib, "METHODS", (("max", 99.99), ("percentile", 99.9), ("entropy", 99.99), ("mse", 99.99)))


@pytest.mark.usefixtures("small")
def test_files_table_and_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLLECT_MS", "ENTROPY_MS", "MSE_WITHIN"):  # what is slow here says nothing about this test
        monkeypatch.setattr(calib, name, 1e9)
    before = torch.get_num_threads()
    assert main(["bench", "calib", "--rounds", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "calib.md").read_text() == out
    assert "| pyquant HistogramStatistics" in out
    assert "percentile 99.9" in out
    data = json.loads((tmp_path / "calib.json").read_text())
    assert {row["method"] for row in data["amax"]} >= {"max", "entropy", "mse", "optimum on the raw numbers"}
    assert [bar["passed"] for bar in data["bars"]] == [True, True, True]
    monkeypatch.setattr(calib, "MSE_WITHIN", -1.0)
    environment = data["environment"]
    assert (environment["threads"], environment["clock"]) == (before, default_clock(before))
    assert main(["bench", "calib", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]) == 1
    assert "FAIL" in capsys.readouterr().out
    environment = json.loads((tmp_path / "calib.json").read_text())["environment"]
    assert (environment["threads"], environment["clock"]) == (1, "cpu")
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("small")
def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "a.png"
    assert main(["bench", "calib", "--plot", str(file), "--data", "gaussian", "--bits", "4"]) == 0
    assert file.stat().st_size > 5000
    assert str(file) in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_without_matplotlib_the_ranges_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "calib", "--plot", str(tmp_path / "a.png")]) == 1
    captured = capsys.readouterr()
    assert "| mse" in captured.out
    assert captured.err.rstrip().endswith("pip install matplotlib")


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--rounds", "--threads"):
        assert main(["bench", "calib", option, "0"]) == 2
        assert option in capsys.readouterr().err


def test_the_data_are_the_documented_ones() -> None:
    sums = {
        "gaussian": 405.768886,
        "laplace": 1664.206112,
        "student_t3": 1828.400932,
        "outliers": -27.488415,
        "relu_gaussian": 209330.323310,
    }
    for kind, total in sums.items():
        x = calib.calib_data(kind)
        assert list(x.shape) == [8, 64, 1024]
        assert float(x.to(torch.float64).sum()) == pytest.approx(total, abs=1e-5)
