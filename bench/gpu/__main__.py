"""Everything that `make gpu` does, in the order of what it is worth, in one command that may be ended and goes on.

    python -m bench.gpu [--out DIR] [--time-budget S] [--only STEP ...] [--again] [--prebuilt]
    python -m bench.gpu --dry-run [--out DIR]
    python -m bench.gpu --merge DIR ... [--replace] [--out DIR]    into bench/results/<gpu>; needs no GPU

The steps: `ready` (libraries, device, a launch of every family), `tests`, `reliability`, `first` (the layers of one
model at four batch sizes), `rows` (their kernels beside the cost model), `decoder` (whole layers of it), `epilogue`
(what each epilogue costs), `conv` (convolutions), `sanitize`, `grid` (every model), `qat`, `mlp`. DIR (default:
bench/results/<gpu>) holds the results, the state of the run (gpu.jsonl) and what every step printed (gpu-<step>.txt):
carry it away, and back to go on with another machine of the same kind. A step that was done is not repeated, one that
ran out of time or was killed goes on where it was, and one that failed is named and repeated with --again. Only pytest
is needed beside the package; pytest-xdist makes the tests quicker.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.gpu.merge import merge
from bench.gpu.process import ROOT, end_leftovers, run_step
from bench.gpu.resume import forget_failed
from bench.gpu.steps import UNFINISHED, Step, dry_steps, steps
from pyquant.errors import PyquantError
from pyquant.io.journal import Journal

BEGAN: Final = time.monotonic()
MOST_WORKERS: Final = 12
Runner = Callable[[Step, Path, float | None], int]


class State(Journal):
    """Exit codes of the steps that ended, in gpu.jsonl. Held by one run at a time; of one setting.

    Raises CheckpointError where another run holds the folder, or it belongs to another setting, naming what differs.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        super().__init__(folder / "gpu.jsonl", "steps of bench.gpu", facts)

    @property
    def codes(self) -> dict[str, int]:
        """The last exit code of each step."""
        return {key.split()[0]: code for key, code in self.entries.items()}

    def set(self, name: str, code: int) -> None:
        """A step that ended; the disk says so when this returns."""
        self.add(f"{name} {len(self.entries)}", code)


def run(
    todo: Sequence[Step],
    out: Path,
    *,
    seconds: float | None,
    facts: Mapping[str, str] | None = None,
    again: bool = False,
    runner: Runner = run_step,
) -> int:
    """Runs what is left. -> 0; 1 when a step failed; UNFINISHED when the time ended first.

    facts  what the results depend on: a folder of others is refused.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    with State(out, facts or {}) as state:
        if ended := end_leftovers(out):
            print(f"bench.gpu: ended {ended} processes that a killed run had left")
        for step in todo:
            held = state.codes.get(step.name)
            if held == 0 or (held not in (None, UNFINISHED) and not again):
                said = "done" if held == 0 else f"failed before with {held}; --again repeats it"
                print(f"bench.gpu: {step.name}: {said}")
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < step.least:
                print(f"bench.gpu: {step.name}: not begun, {left:.0f} s are left; the same command goes on")
                return UNFINISHED
            if held not in (None, UNFINISHED):
                forget_failed(out / f"gpu-{step.name}.jsonl")
            print(f"bench.gpu: {step.name}: begins", flush=True)
            started = time.monotonic()
            code = runner(step, out, left)
            state.set(step.name, code)
            print(f"bench.gpu: {step.name}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
            if step.name == "ready" and code not in (0, UNFINISHED):
                return 1  # nothing else can be trusted
            if code == UNFINISHED:
                return UNFINISHED
        return 1 if any(state.codes.get(step.name, 0) for step in todo) else 0


def options() -> argparse.ArgumentParser:
    """The command line."""
    names = [step.name for step in steps(Path())]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, help="folder of the results (default: bench/results/<gpu>)")
    add("--time-budget", type=float, metavar="S", help="end within S seconds; exit code 3")
    add("--only", nargs="+", choices=names, metavar="STEP", help=f"of: {', '.join(names)}")
    add("--again", action="store_true", help="repeat steps that failed")
    add("--prebuilt", action="store_true", help="libraries were carried from another machine")
    add("--cases", type=int, default=10, help="launches of a kernel, output type and mode (default: 10)")
    add(
        "--dry-run",
        action="store_true",
        help="every step in small without a GPU: on the simulator, faked times",
    )
    add("--merge", nargs="+", type=Path, metavar="DIR", help="only merge what such runs wrote into bench/results/<gpu>")
    add("--replace", action="store_true", help="with --merge: leave out what is there of other libraries or candidates")
    return parser


def main(argv: list[str] | None = None) -> int:
    """-> 0; 1 when a step failed; 2 without a GPU or where the folder is another run's; 3 when time ended first."""
    began = BEGAN if argv is None else time.monotonic()  # loading torch counts
    args = options().parse_args(argv)
    try:
        if args.merge:
            print(f"bench.gpu: merged into {merge(args.merge, args.out, replace=args.replace)}")
            return 0
        return measure(args, began)
    except PyquantError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace, began: float) -> int:
    """The run that the arguments describe, on this machine's GPU or dry. began: on time.monotonic()."""
    import torch

    from bench.shared import folder_name
    from pyquant.measure.environment import describe_environment, library_digest

    if not args.dry_run and not torch.cuda.is_available():
        print("bench.gpu: torch sees no CUDA device; --dry-run goes through every step without one", file=sys.stderr)
        return 2
    environment = describe_environment("cpu" if args.dry_run else "cuda")
    usual = ROOT / "build" / "gpu-dry-run" if args.dry_run else ROOT / "bench" / "results" / folder_name(environment)
    out = (args.out or usual).resolve()
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if importlib.util.find_spec("xdist") else 0
    todo = dry_steps(out) if args.dry_run else steps(out, prebuilt=args.prebuilt, cases=args.cases, workers=workers)
    chosen = [step for step in todo if not args.only or step.name in args.only]
    facts = {
        "gpu": environment.gpu or "none: a dry run",
        "torch": environment.torch,
        "libraries": library_digest(),
        "cases": str(args.cases),
    }
    left = None if args.time_budget is None else args.time_budget - (time.monotonic() - began)
    return run(chosen, out, seconds=left, facts=facts, again=args.again)


if __name__ == "__main__":
    sys.exit(main())
