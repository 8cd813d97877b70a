"""What `make gpu` measures: linear layers of known models on a GPU, every scheme next to its rivals, with the goals.

`python -m bench.gemm` is `pyquant bench gemm --device cuda` with its results in bench/results/<gpu>/ and, in them, a
verdict for every goal of gpu_goals.json. A run that is killed, or that --time-budget ends, goes on when it is started
again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from bench.goals import verdicts
from bench.shared import folder_name
from pyquant.cli.main import main as pyquant
from pyquant.measure.environment import describe_environment
from pyquant.report import registry
from pyquant.report.gemm import verdicts_table
from pyquant.report.records.bench import GemmReport
from pyquant.report.records.environment import FAKED
from pyquant.report.records.record import load_record

RESULTS = Path(__file__).resolve().parent / "results"


def arguments(argv: list[str]) -> list[str]:
    """The command line of `pyquant` that this driver stands for."""
    command = ["bench", "gemm", *argv]
    if not _given("--device", argv):
        command += ["--device", "cuda"]
    if not _given("--out", argv) and not _given("--help", argv) and torch.cuda.is_available():
        command += ["--out", str(RESULTS / folder_name(describe_environment("cuda")))]
    return command


def _given(option: str, argv: list[str]) -> bool:
    return any(word == option or word.startswith(f"{option}=") for word in argv)


def _words(command: list[str]) -> Iterator[str]:
    """The words of a command with '--option=value' as two."""
    for word in command:
        yield from word.split("=", 1) if word.startswith("--") else [word]


def add_verdicts(folder: Path, *, faked: bool = False) -> None:
    """Judges every report of a folder by the goals, in its files and on the screen. faked: those of a dry run."""
    for path in sorted([*folder.glob("gemm.json"), *folder.glob("gemm-*of*.json")]):
        report = load_record(path, GemmReport, faked=faked)
        report = replace(report, verdicts=verdicts(report.rows))
        registry.write(report, folder, path.stem, ("json", "md"))
        print(f"{path.name}:\n\n{verdicts_table(report.verdicts)}")


def main(argv: list[str] | None = None) -> int:
    command = arguments(sys.argv[1:] if argv is None else argv)
    code = pyquant(command)
    if folder := next((value for word, value in pairwise([*_words(command), ""]) if word == "--out"), None):
        add_verdicts(Path(folder), faked=FAKED in command)
    return code


if __name__ == "__main__":
    sys.exit(main())
