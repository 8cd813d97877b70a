"""python -m bench.gpu: what a run does in which order, when it ends, and where it goes on; no GPU is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu import __main__ as gpu  # noqa: E402
from bench.gpu.process import MARK, run_step  # noqa: E402
from bench.gpu.steps import UNFINISHED, Step, dry_steps, steps  # noqa: E402
from pyquant.bench.model_shapes import MODELS  # noqa: E402
from pyquant.errors import CheckpointError  # noqa: E402


def plan(out: Path) -> list[Step]:
    return steps(out, prebuilt=True, cases=10, workers=4)


class Ran:
    """A runner that answers as it is told, and notes what it was asked."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.names = codes, []

    def __call__(self, step: Step, out: Path, seconds: float | None) -> int:
        self.names.append(step.name)
        return self.codes.get(step.name, 0)


def test_what_is_worth_most_comes_first_and_nothing_is_done_twice(tmp_path: Path) -> None:
    first, second = Ran(first=UNFINISHED), Ran()
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=first) == UNFINISHED
    assert first.names == ["ready", "tests", "reliability", "first"]
    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=second) == 0
    assert second.names == ["first", "rows", "decoder", "epilogue", "conv", "experts", "sanitize", "grid", "qat", "mlp"]
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
    assert gpu.run(plan(tmp_path), tmp_path, seconds=90.0, runner=ran) == UNFINISHED
    assert ran.names == ["ready"]


@pytest.mark.parametrize("facts", [{"libraries": "b"}, {"libraries": "a", "gpu": "H100"}])
def test_a_folder_of_other_libraries_or_another_gpu_is_refused(tmp_path: Path, facts: dict[str, str]) -> None:
    gpu.run(plan(tmp_path), tmp_path, seconds=None, facts={"libraries": "a"}, runner=Ran())
    with pytest.raises(CheckpointError, match=r"libraries|gpu"):
        gpu.run(plan(tmp_path), tmp_path, seconds=None, facts=facts, runner=Ran())


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    def second(step: Step, out: Path, seconds: float | None) -> int:
        with pytest.raises(CheckpointError, match="another process"):
            gpu.run(plan(out), out, seconds=None, runner=Ran())
        return 1

    assert gpu.run(plan(tmp_path), tmp_path, seconds=None, runner=second) == 1


@pytest.mark.parametrize(
    ("code", "want"), [("print('said'); raise SystemExit(7)", 7), ("import time; time.sleep(60)", UNFINISHED)]
)
def test_a_step_is_a_process_that_ends_in_time_and_whose_words_are_kept(tmp_path: Path, code: str, want: int) -> None:
    step = Step("tests", ("-c", code), budgeted=False)
    assert run_step(step, tmp_path, 30.0 if want == 7 else 12.0) == want
    assert ("said" in (tmp_path / "gpu-tests.txt").read_text()) == (want == 7)


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(90)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(90)
"""


def marked(out: Path) -> list[str]:
    """Living processes of a run into this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={out}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            pass
    return found


def test_a_step_that_ignores_its_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    started = time.monotonic()
    assert run_step(Step("tests", ("-c", STUBBORN), budgeted=False), tmp_path, 12.0) == UNFINISHED
    assert time.monotonic() - started < 30  # not the ninety seconds of its children
    assert marked(tmp_path) == []


@pytest.mark.parametrize(("budgeted", "unfinished", "want"), [(True, 3, UNFINISHED), (True, 75, 1), (False, 3, 1)])
def test_an_error_that_looks_like_unfinished_is_an_error(
    tmp_path: Path, budgeted: bool, unfinished: int, want: int
) -> None:
    """pytest ends with 3 when it breaks: such a step would go on for ever."""
    step = Step("tests", ("-c", "raise SystemExit(3)"), budgeted=budgeted, unfinished=unfinished)
    assert run_step(step, tmp_path, None) == want


RUNNER = """
import sys
from pathlib import Path
from bench.gpu import __main__ as gpu
from bench.gpu.steps import Step
out = Path(sys.argv[1])
code = '''
import pathlib, sys, time
path = pathlib.Path(sys.argv[1])
began = path.exists()
path.touch()
time.sleep(0 if began else 90)
'''
todo = [Step("ready", ("-c", "pass"), budgeted=False), Step("tests", ("-c", code, str(out / "began")), budgeted=False)]
sys.exit(gpu.run(todo, out, seconds=None))
"""


def test_after_a_kill_9_nothing_of_it_runs_on_and_the_next_run_goes_on(tmp_path: Path) -> None:
    words = [sys.executable, "-c", RUNNER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as first:
        limit = time.monotonic() + 120
        while not (tmp_path / "began").exists() and time.monotonic() < limit:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    assert marked(tmp_path), "what the killed run had started is still there"
    second = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 0, second.stderr
    assert "ended 1 processes" in second.stdout
    assert "ready: done" in second.stdout
    assert marked(tmp_path) == []


def test_the_commands_are_understood(tmp_path: Path) -> None:
    by_name = {step.name: step.command for step in plan(tmp_path)}
    assert "llama-3-8b" in MODELS
    assert "llama-3-8b" in by_name["first"]
    for name in ("ready", "sanitize"):
        assert (ROOT / by_name[name][0]).exists()
    assert (ROOT / "tests" / "gpu" / "test_reliability.py").exists()
    assert "gpu/test_reliability.py" in by_name["reliability"]
    assert "--ignore=gpu/test_reliability.py" in by_name["tests"]
    for name in ("first", "rows", "decoder", "epilogue", "conv", "experts", "grid", "qat", "mlp"):
        assert (ROOT / (by_name[name][1].replace(".", "/") + ".py")).exists()


def test_a_dry_run_is_the_same_commands_with_more_words(tmp_path: Path) -> None:
    whole, small = steps(tmp_path, cases=1), dry_steps(tmp_path)
    assert [step.name for step in small] == [step.name for step in whole]
    for long, short in zip(whole, small, strict=True):
        assert short.command[: len(long.command)] == long.command
        assert len(short.command) > len(long.command)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    printed = capsys.readouterr().err
    assert "no CUDA device" in printed
    assert "--dry-run" in printed
