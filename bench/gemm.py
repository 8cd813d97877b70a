"""What `make gpu` measures: linear layers of known models on a GPU, every scheme next to its rivals, with the goals.

`python -m bench.gemm` is `pyquant bench gemm --device cuda` with its results in bench/results/<gpu>/. A run that is
killed, or that --time-budget ends, goes on when it is started again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pyquant.cli.main import main as pyquant
from pyquant.measure.environment import describe_environment, folder_name

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


def main(argv: list[str] | None = None) -> int:
    return pyquant(arguments(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
