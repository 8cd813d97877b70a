"""bench.mlp as far as a machine without a GPU can tell: where its results go, and what it says without one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is no part of the installed package

from bench import mlp
from pyquant.report.records.record import load_record, save_record
from pyquant.report.records.trade_off import TradeOff, TradeOffAxis, TradeOffPoint, trade_off


def test_without_a_gpu_it_names_the_command_for_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert mlp.main([]) == 2
    assert "pyquant bench mlp --out" in capsys.readouterr().out


def test_results_lie_with_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    judged: list[Path] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(mlp, "describe_environment", lambda device: SimpleNamespace(gpu="NVIDIA H200, sm_90", cpu=""))
    monkeypatch.setattr(mlp, "pyquant", lambda words: called.append(words) or 0)
    monkeypatch.setattr(mlp, "add_verdicts", lambda folder, faked: judged.append(folder))
    assert mlp.main(["--runs", "3"]) == 0
    folder = str(mlp.RESULTS / "nvidia-h200")
    assert called == [["bench", "mlp", "--device", "cuda", "--out", folder, "--runs", "3"]]
    assert judged == [Path(folder)]
    assert mlp.main(["--runs", "3", "--out", "elsewhere"]) == 0
    assert called[1] == ["bench", "mlp", "--device", "cuda", "--out", "elsewhere", "--runs", "3"]
    assert judged[1] == Path("elsewhere"), "judged where it was written"


def test_verdicts_go_to_the_screen_and_into_both_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def points(int8: float) -> list[TradeOffPoint]:
        costs = (("fp16", 10.0, 16.0), ("int8", int8, 8.0), ("int4", 8.0, 4.0))
        return [TradeOffPoint({"layer 1": name}, cost, quality) for name, cost, quality in costs]

    for stem, int8 in (("mlp", 6.0), ("mlp_end_to_end", 7.0)):
        axes, formats = (TradeOffAxis("latency", "us"), TradeOffAxis("capacity", "bits")), ("fp16", "int8", "int4")
        record = trade_off(points(int8), stem, *axes, higher_is_better=True, formats=formats)
        save_record(tmp_path / f"{stem}.json", replace(record, environment={"": "NVIDIA H200, sm_90, 132 SMs"}))
    mlp.add_verdicts(tmp_path)
    shown = capsys.readouterr().out.splitlines()
    assert "PASS: int8 against fp16, kernels: 0.600 (goal <= 0.69)" in shown
    assert "MISS: int8 against fp16, end to end: 0.700 (goal <= 0.62)" in shown
    assert load_record(tmp_path / "mlp.json", TradeOff).notes == tuple(shown)
    assert shown[0] in (tmp_path / "mlp.md").read_text()
