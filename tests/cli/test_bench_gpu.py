"""`pyquant bench gemm --device cuda`, with a CPU in the GPU's place: files, slices, resuming, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pyquant.cli import bench_gpu
from pyquant.cli.main import main
from pyquant.report.records.bench import Ceiling

BASE = ["bench", "gemm", "--device", "cuda"]
SMALL = [*BASE, "--kn", "64x32", "32x64", "--m", "1", "3", "--rounds", "1", "--clock", "cpu"]
FEW = ["--candidates", "QLinear W8A8Dynamic", "QLinear W8A8 (codes in)"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "select_device", lambda name: "cpu")
    limits = [Ceiling("copy", 10.0, "GB/s"), Ceiling("bf16", 100.0, "Gop/s"), Ceiling("int8", 200.0, "Gop/s")]
    monkeypatch.setattr(bench_gpu, "measure_ceilings", lambda device: limits)
    monkeypatch.setattr(bench_gpu, "ROTATE_BYTES", 1)


def shapes_in(path: Path) -> list[tuple[int, int, int]]:
    return sorted({(r["m"], r["k"], r["n"]) for r in json.loads(path.read_text())["rows"]})


@pytest.mark.usefixtures("on_cpu")
def test_results_verdicts_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main([*SMALL, *FEW, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "4/5" in printed.err or "5/5" in printed.err
    names = {"gemm.json", "gemm.csv", "gemm.md", "gemm.png", "gemm.partial.jsonl"}
    assert {p.name for p in tmp_path.iterdir()} == names
    text = (tmp_path / "gemm.md").read_text()
    assert text == printed.out
    data = json.loads((tmp_path / "gemm.json").read_text())
    assert {r["candidate"] for r in data["rows"]} == {
        "torch.mm bf16",
        "QLinear W8A8Dynamic",
        "QLinear W8A8 (codes in)",
    }
    assert (tmp_path / "gemm.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("on_cpu")
def test_slices_stop_resume_and_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, *FEW, "--out", str(tmp_path)]
    assert main([*words, "--slice", "1/2", "--time-budget", "0"]) == bench_gpu.UNFINISHED
    assert "0 of 2 shapes are done; the same command goes on" in capsys.readouterr().err
    assert main([*words, "--slice", "1/2"]) == 0
    assert main([*words, "--slice", "2/2"]) == 0
    parts = [tmp_path / f"gemm-{i}of2.json" for i in (1, 2)]
    seen = [shapes_in(part) for part in parts]
    assert seen == [[(1, 32, 64), (3, 32, 64)], [(1, 64, 32), (3, 64, 32)]]
    merged = tmp_path / "merged"
    assert main([*BASE, "--merge", *map(str, parts), "--out", str(merged)]) == 0
    assert shapes_in(merged / "gemm.json") == sorted(seen[0] + seen[1])
    before = (tmp_path / "gemm-1of2.json").read_text()
    capsys.readouterr()
    assert main([*words, "--slice", "1/2"]) == 0  # everything is there: nothing is measured again
    assert "bench gemm:" not in capsys.readouterr().err
    assert (tmp_path / "gemm-1of2.json").read_text() == before
    assert main([*words, "--slice", "1/2", "--rounds", "2"]) == 1  # another setting
    assert "rounds" in capsys.readouterr().err


@pytest.mark.usefixtures("on_cpu")
def test_a_time_budget_says_that_shapes_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = iter([False, False, False, True])
    monkeypatch.setattr("pyquant.bench.gpu_gemm._late", lambda deadline: next(late))
    words = [*SMALL, *FEW, "--out", str(tmp_path)]
    assert main([*words, "--time-budget", "50"]) == bench_gpu.UNFINISHED
    assert shapes_in(tmp_path / "gemm.json") == [(1, 64, 32), (3, 64, 32)]
    monkeypatch.setattr("pyquant.bench.gpu_gemm._late", lambda deadline: False)
    assert main(words) == 0
    assert len(shapes_in(tmp_path / "gemm.json")) == 4


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_bit_is_exit_code_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pyquant.bench.gpu_gemm.torch.equal", lambda a, b: False)
    assert main([*SMALL, "--candidates", "QLinear W8A8Dynamic"]) == 1
    assert "NOT EXACT" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--slice", "3/2"], "--slice"),
        (["--slice", "x"], "--slice"),
        (["--models", "gpt-2"], "gpt-2"),
        (["--candidates", "cublas"], "cublas"),
        (["--m", "0"], "--m"),
        (["--dtype", "float16"], "--dtype"),
        (["--schemes", "W8A8"], "--candidates"),
        (["--peers", "torchao"], "--candidates"),
        (["--baseline", "F.linear"], "--baseline"),
        (["--threads", "3"], "--threads"),
        (["--cold"], "--cold"),
    ],
)
def test_wrong_options_are_refused_by_name(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [] if "--models" in words else ["--kn", "64x32"]
    assert main([*BASE, *shapes, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_report_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--merge", "no-such-file.json"]) == 1
    assert "no-such-file.json" in capsys.readouterr().err


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main([*SMALL[:3], "cuda:1"]) == 2
    assert "cuda:0" in capsys.readouterr().err


def test_the_current_device_needs_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device refuses 'cuda' alone: every run of `bench gemm --device cuda` on a GPU ended there."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: taken.append(torch.cuda._utils._get_device_index(device))
    )
    assert [bench_gpu.select_device(name) for name in ("cuda", "cuda:1")] == ["cuda", "cuda:1"]
    assert taken == [1]
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device("cuda")
