"""What a command says of data that does not fit: one line that names the option, if it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyquant.cli.main import main
from pyquant.errors import CalibrationError


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 8))


def wrong() -> list[torch.Tensor]:
    return [torch.randn(8, 63)]


def one() -> list[torch.Tensor]:
    return [torch.randn(8, 64)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scheme", "W8A8Dynmic"], "argument '--scheme': got 'W8A8Dynmic'"),
        (["--scheme=W8A8", "--data", f"{__name__}:one", "--improve", "smoth"], "argument '--improve'"),
    ],
)
def test_quantize_names_the_option(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", f"{__name__}:build", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_batch_that_the_model_cannot_take_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scheme", "W8A8", "--data", f"{__name__}:wrong", "--out", str(tmp_path / "out")]
    assert main(["quantize", f"{__name__}:build", *words]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "data: on batch 0 the model raised: mat1 and mat2" in line


def test_latency_takes_what_batches_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["latency", f"{__name__}:build", "--data", f"{__name__}:one", "--seconds", "0.1", "--rounds", "3"]
    call += ["--held-out", "1", "--out", str(tmp_path / "l.json")]
    assert main(call) == 0
    assert main([*call, "--batches", "3"]) == 2
    assert "argument '--batches': got 3; allowed: at most 1" in capsys.readouterr().err


def test_the_cause_is_kept() -> None:
    from pyquant import quantize_

    with pytest.raises(CalibrationError, match="batch 0 the model raised: mat1 and mat2") as raised:
        quantize_(build(), "W8A8", data=wrong())
    assert type(raised.value.__cause__) is RuntimeError
