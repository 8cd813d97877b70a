"""`pyquant tune`: reports, writes the user's table whole, merges, and says clearly what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from pyquant.cli import tune as command
from pyquant.cli.main import main
from pyquant.io.atomic import SaveDirectory
from pyquant.measure.tune import TuneOutcome, problems_for
from pyquant.ops import native_available, tuned

native = pytest.importorskip("pyquant._native", reason="the compiled module is not built")
pytestmark = pytest.mark.skipif(not native_available(), reason="the compiled library is not built")

GPU = "GPU X"


class FakeRig:
    device: ClassVar = {"sm": 80, "sm_count": 108, "name": GPU}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYQUANT_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    monkeypatch.undo()
    tuned.activate(tuned.load())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Every problem's quickest row is gemm_simt_any; -> the problems that were asked for."""
    asked: list[dict] = []

    def fake(problems: list[dict], rig: object, *, rounds: int, on_problem: object) -> list[TuneOutcome]:
        found = []
        for p in problems:
            asked.append(p)
            on_problem(p)
            earlier = native.tuned(p, FakeRig.device)
            choice = tuned.Choice(
                p.get("x", "s8"),
                p["w"],
                p["out"],
                False,
                "natural",
                p.get("group_size", 0),
                p["n"],
                p["k"],
                p["m"],
                "gemm_simt_any",
                5.0,
                "gemm_sm80_s8s8_16x64x128",
                10.0,
            )
            before = earlier[0] if earlier else ""
            found.append(TuneOutcome(p, choice, before, {"gemm_simt_any": 5.0}, {"gemm_z": "slow"}))
        return found

    monkeypatch.setattr(command, "tune", fake)
    monkeypatch.setattr(command, "make_rig", lambda index, clock: FakeRig())
    return asked


def test_it_reports_writes_and_is_followed(
    cache: Path, measured: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--shapes", "4096x1024", "--m", "1", "60", "--schemes", "W8A8", "--dtype", "float16"]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 choices changed" in text
    assert "was gemm_sm80_s8s8_16x64x128" in text
    assert "gemm_z at M=1 N=4096 K=1024: slow" in text
    assert str(cache / tuned.FILE) in text
    assert [p["m"] for p in measured] == [1, 64]
    table = tuned.parse((cache / tuned.FILE).read_bytes(), "t.json")
    assert len(table.gpus[GPU]) == 2
    assert table.notes[GPU]["torch"] == torch.__version__
    assert native.tuned(measured[1] | {"m": 50}, FakeRig.device) == ("gemm_simt_any", 5.0)
    # again: nothing changed, and other shapes join those that are there
    assert main(["tune", "--shapes", "4096x1024", "64x64", "--m", "64", "--schemes", "W8A8", "--dtype", "float16"]) == 0
    text = capsys.readouterr().out
    assert "1 of 2 choices changed" in text
    assert len(tuned.parse((cache / tuned.FILE).read_bytes(), "t.json").gpus[GPU]) == 3
    assert [p.name for p in cache.iterdir()] == [tuned.FILE]


def test_dry_run_writes_nothing_and_json_is_whole(
    cache: Path, measured: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--shapes", "64x64", "--m", "1", "--dry-run", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["choice"]["row"] == "gemm_simt_any"
    assert not cache.exists()


def test_the_layers_of_a_saved_model(cache: Path, measured: list[dict], tmp_path: Path) -> None:
    import pyquant

    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32), torch.nn.Embedding(4, 8))
    pyquant.quantize_(model, pyquant.W8A8Dynamic())
    pyquant.save_pretrained(model, tmp_path / "model")
    assert main(["tune", "--model", str(tmp_path / "model"), "--m", "1"]) == 0
    assert sorted((p["n"], p["k"]) for p in measured) == [(32, 64), (64, 32)]


def test_a_wrong_result_is_exit_code_one(
    cache: Path, measured: list[dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = problems_for([(64, 64, "W8A8")], [1])[0]
    wrong = TuneOutcome(problem, None, dropped={"gemm_q": "its result differs from the specification"})
    monkeypatch.setattr(command, "tune", lambda *a, **k: [wrong])
    assert main(["tune", "--shapes", "64x64", "--m", "1"]) == 1
    assert "nothing ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        ([], "--shapes"),
        (["--shapes", "64"], "--shapes"),
        (["--shapes", "0x64"], "--shapes"),
        (["--shapes", "64x64", "--m", "0"], "--m"),
        (["--shapes", "64x64", "--rounds", "0"], "--rounds"),
        (["--shapes", "64x64", "--schemes", "W9"], "W9"),
    ],
)
def test_bad_arguments_are_named(words: list[str], argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *words]) == 2
    assert argument in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what in (["--shapes", "64x64"], ["--model", "no-such-folder"]):
        assert main(["tune", *what, "--m", "1"]) == 1
        assert "tune measures on a GPU, and torch sees none here" in capsys.readouterr().err
    assert not cache.exists()


def test_a_damaged_table_is_not_overwritten(
    cache: Path, measured: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir()
    (cache / tuned.FILE).write_bytes(b"{")
    assert main(["tune", "--shapes", "64x64", "--m", "1"]) == 1
    assert tuned.FILE in capsys.readouterr().err
    assert (cache / tuned.FILE).read_bytes() == b"{"


def test_two_at_once_is_a_clear_error(cache: Path, measured: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    with SaveDirectory(cache):
        assert main(["tune", "--shapes", "64x64", "--m", "1"]) == 1
    assert "one at a time" in capsys.readouterr().err


def test_doctor_tells_of_choices_that_are_not_used(cache: Path) -> None:
    from pyquant import diagnosis

    cache.mkdir()
    (cache / tuned.FILE).write_bytes(b"{")
    tuned.activate(tuned.load())
    assert any(tuned.FILE in remark for remark in diagnosis._remarks())


def test_whole_layers_are_reported_and_written(
    cache: Path, measured: list[dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tuned.LayerChoice("s8", "s8 dynamic", False, 0, "bf16", 64, 32, 1, 4.0, 6.0)
    said = "its result differs from the specification"

    def fake(*args: object, on_layer: object, **options: object) -> tuple[list, dict]:
        on_layer(1, 64, 32)
        return [whole], {"W8A8Dynamic at M=1 N=9 K=9": said}

    monkeypatch.setattr(command, "time_layers", fake)
    words = ["tune", "--shapes", "64x32", "--m", "1", "--residual"]
    assert main([*words, "--layers", "--graph"]) == 1
    text = capsys.readouterr().out
    assert "s8 dynamic x s8" in text
    assert "1.50" in text
    assert said in text
    assert ["residual" in p for p in measured] == [False, True]
    table = tuned.parse((cache / tuned.FILE).read_bytes(), "t.json")
    assert list(table.layers[GPU].values()) == [whole]
    assert table.notes[GPU]["layer_clock"] == "cuda-graph"
    assert main([*words, "--graph"]) == 2
    assert "--layers" in capsys.readouterr().err
