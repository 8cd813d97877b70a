"""What a command says of data that does not fit: one line that names the option, if it was given."""

from __future__ import annotations

from collections.abc import Iterator
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


def many() -> Iterator[torch.Tensor]:
    return (torch.randn(8, 64) for _ in range(3))


def never() -> torch.nn.Module:
    raise AssertionError("built before what can be known was looked at")


OUT_OF_REACH = {
    "error out": ["error", "saved", "--against", "MODEL", "--data", "DATA", "--out", "e.xyz"],
    "error batches": ["error", "saved", "--against", "MODEL", "--data", "DATA", "--batches", "0"],
    "search out": ["search", "MODEL", "--data", "DATA", "--out", "plan.txt"],
    "search record": ["search", "MODEL", "--data", "DATA", "--record", "r.txt"],
    "search calibration": ["search", "MODEL", "--data", "DATA", "--calibration", "c.yaml"],
    "search report": ["search", "MODEL", "--data", "DATA", "--report", "r.html", "r.doc"],
    "sensitivity out": ["sensitivity", "MODEL", "--data", "DATA", "--out", "file"],
    "latency out": ["latency", "MODEL", "--data", "DATA", "--out", "latency.csv"],
    "latency batches": ["latency", "MODEL", "--data", "DATA", "--batches", "-1"],
    "quantize out": ["quantize", "MODEL", "--scheme", "W8A8Dynamic", "--out", ""],
    "quantize  out": ["quantize", "MODEL", "--scheme", "W8A8Dynamic", "--out", "file/inside"],
    "quantize batches": ["quantize", "MODEL", "--scheme", "W8A8", "--data", "DATA", "--out", "q", "--batches", "0"],
}


@pytest.mark.parametrize("case", OUT_OF_REACH)
def test_what_cannot_be_written_is_known_before_the_work(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    names = {"MODEL": f"{__name__}:never", "DATA": f"{__name__}:one"}
    assert main([names.get(word, word) for word in OUT_OF_REACH[case]]) == 2
    assert f"argument '--{case.split()[1]}'" in capsys.readouterr().err


def test_a_place_that_is_not_ours_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs").mkdir()

    def refuse(prefix: str, dir: Path) -> str:
        if str(dir).endswith("theirs"):
            raise FileNotFoundError(2, "No such file or directory")  # as /proc tells an administrator
        made = Path(dir) / f"{prefix}tried"
        made.mkdir()
        return str(made)

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    call = ["quantize", f"{__name__}:never", "--scheme", "W8A8Dynamic", "--out", str(tmp_path / "theirs/new")]
    assert main(call) == 2
    assert "theirs cannot be written to" in capsys.readouterr().err
    (tmp_path / "others").mkdir()
    (tmp_path / "others/config.json").write_text("{}")
    assert main([*call[:-1], str(tmp_path / "others")]) == 1
    assert "'config.json' is not of pyquant" in capsys.readouterr().err


def test_quantize_takes_data_that_cannot_say_how_much_it_is(tmp_path: Path) -> None:
    call = ["quantize", f"{__name__}:build", "--scheme", "W8A8", "--data", f"{__name__}:many"]
    assert main([*call, "--out", str(tmp_path / "q")]) == 0


def test_files_are_written_before_tables_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the table may leave."""
    call = ["latency", f"{__name__}:build", "--data", f"{__name__}:one", "--seconds", "0.1", "--rounds", "3"]

    def leave(*words: object, **how: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("pyquant.cli.latency.print", leave, raising=False)
    assert main([*call, "--held-out", "1", "--out", str(tmp_path / "l.json")]) == 141
    assert (tmp_path / "l.json").exists()


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.randn(64) for _ in range(8)])


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Endless(), batch_size=4)


def test_quantize_takes_loaders_without_a_length(tmp_path: Path) -> None:
    call = ["quantize", f"{__name__}:build", "--scheme", "W8A8", "--data", f"{__name__}:loader"]
    assert main([*call, "--out", str(tmp_path / "q")]) == 0
