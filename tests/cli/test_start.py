"""The help and the version come before torch: quick, the same text as the whole parser's, for this program alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fresh import ROOT

import pyquant
from pyquant.cli import start
from pyquant.cli.main import build_parser, main

BUDGET_S = 0.5


def run(words: list[str], code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "pyquant"]), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["--version"]])
def test_no_torch_for_the_help_and_the_version(words: list[str]) -> None:
    before = os.times()
    done = run(words)
    after = os.times()
    assert (done.returncode, done.stderr) == (0 if words else start.USAGE, "")
    assert done.stdout == (
        f"pyquant {pyquant.__version__}\n" if words == ["--version"] else start.outline().format_help()
    )
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds <= BUDGET_S  # of the processor: the clock on the wall would measure the neighbours


def test_the_outline_is_the_whole_parsers_help() -> None:
    assert start.outline().format_help() == build_parser().format_help()


def test_other_programs_are_left_alone(tmp_path: Path) -> None:
    assert start.answer(["--help"], "/usr/bin/mine") is None
    assert start.answer(["--help"], "-m") is None
    assert start.answer(["doctor", "--help"], "/usr/bin/pyquant") is None
    assert start.answer(["--help"], "/usr/bin/pyquant") == start.outline().format_help()
    script = "import sys; sys.argv = ['mine.py', '--help']; import pyquant; print('went on')"
    assert run(["--help"], script).stdout == "went on\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["qantize"], "quantize"),
        (["bench", "gem"], "gemm"),
        (["inspect", "x", "--jsn"], "--json"),
        (["verify", "q", "--agianst=m:f"], "--against"),
        (["--tracebak", "doctor"], "--traceback"),
        (["bench", "mlp", "--capacity", "outputs"], "output"),
    ],
)
def test_what_was_called_wrongly_is_one_line_with_what_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == start.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"did you mean {meant}?" in line


def test_a_warning_is_shown_without_the_source_that_gave_it() -> None:
    code = (
        "import warnings; from pyquant.cli import main, doctor;"
        "doctor.run = lambda args: warnings.warn('careful', UserWarning, 1) or 0; main.main(['doctor'])"
    )
    assert run([], code).stderr == "warning: careful\n"
