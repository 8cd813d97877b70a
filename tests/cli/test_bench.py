"""`pyquant bench gemm`: arguments, files, and the exit code when a bit is wrong. No timed assertion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyquant.bench.model_shapes import parse_kn
from pyquant.bench.peers import FBGEMM, FP32, PEERS
from pyquant.cli.bench_gemm import match_peers
from pyquant.cli.main import main
from pyquant.errors import ArgumentError

SMALL = ["bench", "gemm", "--m", "2", "--kn", "64x32", "--rounds", "1", "--no-floor", "--schemes", "W8A8Dynamic"]


def test_files_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = [tmp_path / name for name in ("a.json", "a.csv", "a.png")]
    words = [
        word for option, path in zip(("--json", "--csv", "--plot"), files, strict=True) for word in (option, str(path))
    ]
    assert main([*SMALL, *words]) == 0
    captured = capsys.readouterr()
    assert "QLinear W8A8Dynamic" in captured.out
    assert "1/1 M=2 K=64 N=32" in captured.err
    data = json.loads(files[0].read_text())
    assert {row["candidate"] for row in data["rows"]} >= {FP32, "QLinear W8A8Dynamic"}
    assert files[1].read_text().count("\n") == 1 + len(data["rows"])
    assert files[2].stat().st_size > 1000


def test_wrong_bits_give_exit_code_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pyquant.bench.gemm.is_exact", lambda layer, x: False)
    assert main([*SMALL, "--peers"]) == 1
    assert "NOT EXACT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--m", "0"], "--m"),
        (["--kn", "64"], "--kn"),
        (["--kn", "64x0"], "--kn"),
        (["--rounds", "0"], "--rounds"),
        (["--threads", "0"], "--threads"),
        (["--peers", "cublas"], "cublas"),
        (["--baseline", "cublas"], "cublas"),
        (["--schemes", "W7A7"], "W7A7"),
        (["--device", "mps"], "--device"),
        (["--time-budget", "3"], "--time-budget"),
        (["--models", "bert-base"], "--models"),
    ],
)
def test_wrong_options_are_refused_by_name(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*SMALL, "--device", "cuda"]) == 2
    assert "--device" in capsys.readouterr().err


def test_peers_by_part_of_their_name() -> None:
    assert match_peers(["fbgemm"]) == [FBGEMM]
    assert match_peers([FP32]) == [FP32]
    assert set(match_peers(["fp32", "FBGEMM"])) == {p.name for p in PEERS if "fp32" in p.name} | {FBGEMM}
    with pytest.raises(ArgumentError, match="scaled"):
        match_peers(["scaled_mm"])  # a GPU peer


def test_shapes() -> None:
    assert parse_kn("1024X4096") == (1024, 4096)
    for bad in ("", "1024", "x", "1x-1", "1.5x2"):
        with pytest.raises(ArgumentError):
            parse_kn(bad)
