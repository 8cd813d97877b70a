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


class Gone:
    """A standard output whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        raise OSError


def test_a_reader_that_leaves_is_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not 1, which says that a problem was found."""
    monkeypatch.setattr("sys.stdout", Gone())
    assert command.main(["--version"]) == 141


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["doctor"]])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_closed_pipe_and_a_full_disk_end_quietly(words: list[str], buffered: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "" if buffered else "1"}
    start = [sys.executable, "-m", "pyquant", *words]
    run = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    assert run.stdout is not None
    run.stdout.close()
    _, told = run.communicate()
    assert (run.returncode, told) == (141, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(start, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("pyquant: error: ")
    assert line.endswith("No space left on device")


def test_names_that_a_terminal_cannot_show_end_no_command(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    start = [sys.executable, "-m", "pyquant", "inspect", str(tmp_path / "ü")]
    run = subprocess.run(start, capture_output=True, env=environment, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("pyquant: error: ")
    assert "\\xfc" in run.stderr


@pytest.mark.parametrize("words", [["--version"], ["inspect", "no-such-folder"]])
def test_a_process_without_a_standard_output(words: list[str]) -> None:
    start = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "pyquant", *words]
    run = subprocess.run(
        start, stderr=subprocess.PIPE, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == (0 if words == ["--version"] else 1)
    assert "Traceback" not in run.stderr
