"""bench.mlp as far as a machine without a GPU can tell: where its results go, and what it says without one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is no part of the installed package

from bench import mlp


def test_without_a_gpu_it_names_the_command_for_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert mlp.main([]) == 2
    assert "pyquant bench mlp --out" in capsys.readouterr().out


def test_results_lie_with_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(mlp, "describe_environment", lambda device: SimpleNamespace(gpu="NVIDIA H200, sm_90", cpu=""))
    monkeypatch.setattr(mlp, "pyquant", lambda words: called.append(words) or 0)
    assert mlp.main(["--runs", "3"]) == 0
    folder = str(mlp.RESULTS / "nvidia-h200")
    assert called == [["bench", "mlp", "--device", "cuda", "--out", folder, "--runs", "3"]]
