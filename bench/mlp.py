"""The founding experiment at full size on a GPU: all 729 configurations, kept beside the other results of that GPU.

`python -m bench.mlp` (a part of `make gpu`) is `pyquant bench mlp --device cuda --out bench/results/<gpu>`; words that
it is given are added, and another --out is where everything goes. A killed run goes on.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench.goals import mlp_bars
from bench.shared import folder_name
from pyquant.cli.main import main as pyquant
from pyquant.measure.environment import describe_environment
from pyquant.report import registry
from pyquant.report.records.environment import FAKED
from pyquant.report.records.record import load_record
from pyquant.report.records.trade_off import TradeOff

RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: list[str] | None = None) -> int:
    """-> what `pyquant bench mlp` returns; 2 without a GPU."""
    words = sys.argv[1:] if argv is None else argv
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--out", type=Path)
    given.add_argument("--clock")
    args, others = given.parse_known_args(words)
    faked = args.clock == FAKED
    if not torch.cuda.is_available() and not faked:
        print("bench.mlp: torch sees no CUDA device; on a CPU: pyquant bench mlp --out DIR")
        return 2
    folder = args.out or RESULTS / folder_name(describe_environment("cpu" if faked else "cuda"))
    clock = ["--clock", args.clock] if args.clock else []
    code = pyquant(["bench", "mlp", "--device", "cuda", "--out", str(folder), *clock, *others])
    if code == 0:
        add_verdicts(folder, faked=faked)
    return code


def add_verdicts(folder: Path, *, faked: bool = False) -> None:
    """Judges both columns by the goals: lines on the screen and among the notes of the records. faked: a dry run's."""
    columns = {stem: load_record(folder / f"{stem}.json", TradeOff, faked=faked) for stem in ("mlp", "mlp_end_to_end")}
    lines = [
        f"{'PASS' if bar.passed else 'MISS'}: {bar.name}: {bar.measured:.3f} (goal {bar.direction} {bar.goal:g})"
        for bar in mlp_bars(columns)
    ]
    print("\n".join(lines))
    for stem, record in columns.items():
        registry.write(replace(record, notes=(*record.notes, *lines)), folder, stem, ("json", "md", "html"))


if __name__ == "__main__":
    sys.exit(main())
