"""python -m bench.gpu: what a run does in which order, when it ends, and where it goes on; no GPU is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import gpu  # noqa: E402
from pyquant.bench.model_shapes import MODELS  # noqa: E402


def plan(out: Path) -> list[gpu.Step]:
    return gpu.steps(out, prebuilt=True, cases=10, workers=4)


class Ran:
    """A runner that answers as it is told, and notes what it was asked."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.names = codes, []

    def __call__(self, step: gpu.Step, out: Path, seconds: float | None) -> int:
        self.names.append(step.name)
        return self.codes.get(step.name, 0)


def test_what_is_worth_most_comes_first_and_nothing_is_done_twice(tmp_path: Path) -> None:
    first, second = Ran(first=gpu.UNFINISHED), Ran()
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=first) == gpu.UNFINISHED
    assert first.names == ["ready", "tests", "reliability", "first"]
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=second) == 0
    assert second.names == ["first", "sanitize", "grid", "qat", "mlp"]
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=Ran(ready=1)) == 0  # nothing is left


def test_a_failure_is_the_exit_code_and_does_not_stop_the_others(tmp_path: Path) -> None:
    ran = Ran(tests=1)
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=ran) == 1
    assert ran.names[-1] == "mlp"
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=Ran()) == 1
    again = Ran()
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, again=True, runner=again) == 0
    assert again.names == ["tests"]


def test_a_machine_that_is_not_ready_is_not_used(tmp_path: Path) -> None:
    ran = Ran(ready=1)
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=ran) == 1
    assert ran.names == ["ready"]


def test_no_step_begins_without_the_time_it_needs(tmp_path: Path) -> None:
    ran = Ran()
    assert gpu.run(plan(tmp_path), tmp_path, seconds=90.0, runner=ran) == gpu.UNFINISHED
    assert ran.names == ["ready"]


@pytest.mark.parametrize(
    ("code", "want"), [("print('said'); raise SystemExit(7)", 7), ("import time; time.sleep(60)", 3)]
)
def test_a_step_is_a_process_that_ends_in_time_and_whose_words_are_kept(tmp_path: Path, code: str, want: int) -> None:
    step = gpu.Step("tests", ("-c", code))
    assert gpu.run_step(step, tmp_path, 30.0 if want == 7 else 2.0) == want
    assert ("said" in (tmp_path / "gpu-tests.txt").read_text()) == (want == 7)


def test_the_commands_are_understood(tmp_path: Path) -> None:
    by_name = {step.name: step.command for step in plan(tmp_path)}
    assert "llama-3-8b" in MODELS
    assert "llama-3-8b" in by_name["first"]
    for name in ("ready", "sanitize"):
        assert (ROOT / by_name[name][0]).exists()
    assert (ROOT / "tests" / "gpu" / "test_reliability.py").exists()
    assert "gpu/test_reliability.py" in by_name["reliability"]
    assert "--ignore=gpu/test_reliability.py" in by_name["tests"]
    for name in ("first", "grid", "qat", "mlp"):
        assert (ROOT / (by_name[name][1].replace(".", "/") + ".py")).exists()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
