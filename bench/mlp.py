"""The founding experiment at full size on a GPU: all 729 configurations, kept beside the other results of that GPU.

`python -m bench.mlp` (a part of `make gpu`) is `pyquant bench mlp --device cuda --out bench/results/<gpu>`; words that
it is given are added. A killed run goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pyquant.cli.main import main as pyquant
from pyquant.measure.environment import describe_environment, folder_name

RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: list[str] | None = None) -> int:
    """-> what `pyquant bench mlp` returns; 2 without a GPU."""
    if not torch.cuda.is_available():
        print("bench.mlp: torch sees no CUDA device; on a CPU: pyquant bench mlp --out DIR")
        return 2
    folder = RESULTS / folder_name(describe_environment("cuda"))
    return pyquant(
        ["bench", "mlp", "--device", "cuda", "--out", str(folder), *(sys.argv[1:] if argv is None else argv)]
    )


if __name__ == "__main__":
    sys.exit(main())
