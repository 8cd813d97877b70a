"""Help, exit codes and one-line errors of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pyquant
from pyquant.cli import main as command
from pyquant.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    ["doctor"],
    ["quantize"],
    ["calibrate"],
    ["sensitivity"],
    ["search"],
    ["inspect"],
    ["verify"],
    ["convert"],
    ["export"],
    ["error"],
    ["latency"],
    ["bench"],
    ["bench", "gemm"],
    ["bench", "mlp"],
    ["tune"],
    ["report"],
)


@pytest.mark.parametrize("words", [[], *COMMANDS], ids=" ".join)
def test_help_has_examples_and_exit_code_zero(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main([*words, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: pyquant")
    if words != ["bench"]:
        assert "examples:" in text


def test_documentation_names_every_command_and_option() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    parser = command.build_parser()
    subparsers = next(a for a in parser._actions if a.choices and "doctor" in a.choices).choices
    kinds = next(a for a in subparsers["bench"]._actions if a.choices and "gemm" in a.choices).choices
    assert set(subparsers) == {words[0] for words in COMMANDS}
    for name, sub in [*subparsers.items(), ("bench gemm", kinds["gemm"]), ("bench mlp", kinds["mlp"])]:
        assert f"pyquant {name}" in text
        for action in sub._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or f"`{option}" in text, f"{name} {option}"


def test_no_command_prints_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["nonsense"], ["doctor", "--wrong"], ["quantize"], ["bench", "nothing"], ["bench"]])
def test_bad_usage_is_exit_code_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main(words)
    assert exit_info.value.code == 2
    assert "see pyquant" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pyquant {pyquant.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (pyquant.ArgumentError("--m", 0, ">= 1"), 2),
        (CheckpointError("file x is damaged"), 1),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(directory: str) -> None:
        raise error

    monkeypatch.setattr("pyquant.cli.inspect.read_manifest", fail)
    assert command.main(["inspect", "x"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pyquant: ")
    assert captured.err.count("\n") == 1


def test_unexpected_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("pyquant.cli.inspect.read_manifest", fail)
    with pytest.raises(ZeroDivisionError):
        command.main(["inspect", "x"])


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--traceback", "inspect", "no-such-folder"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_python_dash_m() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "pyquant", "inspect", "no-such-folder"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("pyquant: error: no-such-folder")
