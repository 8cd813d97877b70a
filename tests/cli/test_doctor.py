"""doctor(): tells what runs, and finds what is broken."""

from __future__ import annotations

import json

import pytest

import pyquant
from pyquant import diagnosis as module
from pyquant.cli.main import main
from pyquant.core.presets import PRESETS
from pyquant.ops import native_available


def test_every_scheme_is_tried_on_the_cpu() -> None:
    diagnosis = pyquant.doctor()
    cpu = {c.scheme: c for c in diagnosis.capabilities if c.device == "cpu"}
    assert set(cpu) == {*PRESETS, "embeddings=True"}
    assert all(c.runs and c.kernel for c in cpu.values())
    assert {name for name, c in cpu.items() if c.exact} == {
        "W8A8",
        "W8A8Dynamic",
        "W4A8",
        "W4A8Dynamic",
        "W4A8TwoLevel",
        "W4A8TwoLevelDynamic",
        "W4A4",
        "W4A4Dynamic",
        "embeddings=True",
    }
    assert diagnosis.ok == native_available()


def test_json_is_whole_and_the_exit_code_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert code == (0 if data["ok"] else 1)
    assert set(data) == {
        "ok",
        "environment",
        "native_library",
        "cuda",
        "optional",
        "capabilities",
        "problems",
        "remarks",
    }
    assert data["cuda"]


def test_text_has_a_line_for_everything(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    text = capsys.readouterr().out
    for wanted in ("torch", "CPU:", "native library:", "CUDA:", "optional:", "embeddings=True", *PRESETS):
        assert wanted in text


def test_wrong_bits_are_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pyquant.measure.exact.is_exact", lambda layer, x: False)
    assert main(["doctor"]) == 1
    assert "bits differ from the specification" in capsys.readouterr().out


def test_a_scheme_that_does_not_run_is_a_problem_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise pyquant.UnsupportedError("no kernel takes it")

    monkeypatch.setattr("pyquant.bench.problem.Inputs.qlinear", fail)
    diagnosis = module.doctor()
    assert not diagnosis.ok
    rows = [c for c in diagnosis.capabilities if c.scheme in PRESETS]
    assert all("no kernel takes it" in c.reason and not c.runs for c in rows)
    assert "no kernel takes it" in str(diagnosis)


def test_a_missing_library_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyquant.ops.why_not_native", lambda: "it was not built")
    assert "it was not built" in module.doctor().problems[0]


def test_kernels_with_and_without_machine_code_are_told_apart() -> None:
    rows = [{"name": "gemm_a", "compiled": True}, {"name": "gemm_b", "compiled": False}]
    assert module.kernel_lines(rows) == [
        "1 of 2 kernels have machine code here: gemm_a",
        "left out at build time: gemm_b",
    ]
    assert module.kernel_lines(rows[:1]) == ["1 of 1 kernels have machine code here: gemm_a"]
    assert "none of 1" in module.kernel_lines(rows[1:])[0]


def test_a_cpu_without_dot_products_gets_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_features", lambda: frozenset({"avx2"}))
    assert "VNNI" in module.doctor().remarks[0]
    monkeypatch.setattr(module, "cpu_features", lambda: frozenset({"avx2", "avx512_vnni"}))
    assert module.doctor().remarks == []
