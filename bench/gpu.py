"""Everything that `make gpu` does, in the order of what it is worth, in one command that may be ended and goes on.

    python -m bench.gpu [--out DIR] [--time-budget S] [--only STEP ...] [--again] [--prebuilt]

The steps: `ready` (libraries, device, a launch of every family), `tests`, `reliability`, `first` (the layers of one
model at four batch sizes), `sanitize`, `grid` (every model), `qat`, `mlp`. DIR (default: bench/results/<gpu>) holds the
results, the state of the run (gpu.json) and what every step printed (gpu-<step>.txt): carry it away, and back to go on
with another machine of the same kind. A step that was done is not repeated, one that ran out of time goes on, and one
that failed is named and repeated with --again. Only pytest is needed beside the package; pytest-xdist makes the tests
quicker.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
UNFINISHED: Final = 3  # exit code of a step, and of this command, that goes on when it is started again
MOST_WORKERS: Final = 12
Runner = Callable[["Step", Path, float | None], int]


@dataclass(frozen=True)
class Step:
    """One part of the run.

    command  words behind the interpreter; `folder`: where it runs, below the repository.
    budgeted takes --time-budget and answers UNFINISHED when it ends.
    least    seconds without which it is not begun.
    """

    name: str
    command: tuple[str, ...]
    folder: str = "."
    budgeted: bool = False
    least: float = 30.0
    environment: dict[str, str] = field(default_factory=dict)


def steps(out: Path, *, prebuilt: bool, cases: int, workers: int) -> list[Step]:
    """The parts, the most valuable ones first.

    Example:
        >>> [step.name for step in steps(Path("x"), prebuilt=True, cases=10, workers=0)][:3]
        ['ready', 'tests', 'reliability']
    """
    pytest = ("-m", "pytest", "-c", "../pyproject.toml", "--rootdir", "..", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    alone = "gpu/test_reliability.py"  # reads the device's free memory: beside nothing else
    spread = ("-n", str(workers)) if workers else ()
    gemm = ("-m", "bench.gemm", "--out", str(out))
    return [
        Step("ready", ("tools/gpu_ready.py", *(["--prebuilt"] if prebuilt else []))),
        Step("tests", (*pytest, "gpu", f"--ignore={alone}", "--maxfail=40", *spread), "tests", least=120.0,
             environment={"PYQUANT_CASES": str(cases)}),
        Step("reliability", (*pytest, alone, "--maxfail=40"), "tests", least=120.0),
        Step("first", (*gemm, "--models", "llama-3-8b", "--m", "1", "16", "256", "4096"), budgeted=True, least=60.0),
        Step("sanitize", ("tools/sanitize.py", "--out", str(out / "sanitize.json"), "--allow-missing"), budgeted=True),
        Step("grid", gemm, budgeted=True, least=60.0),
        Step("qat", ("-m", "bench.qat_gpu", "--out", str(out)), least=60.0),
        Step("mlp", ("-m", "bench.mlp", "--out", str(out)), least=60.0),
    ]  # fmt: skip


class State:
    """Exit codes of the steps that ended, in gpu.json."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gpu.json"
        self.codes: dict[str, int] = json.loads(self.path.read_text())["codes"] if self.path.exists() else {}

    def set(self, name: str, code: int) -> None:
        """A step that ended; the file says so when this returns."""
        self.codes[name] = code
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps({"codes": self.codes}, indent=1) + "\n")
        fresh.replace(self.path)


def run_step(step: Step, out: Path, seconds: float | None) -> int:
    """Runs one part for at most so many seconds, printing what it says and keeping it. -> its exit code."""
    budget = ("--time-budget", f"{max(seconds - 20, 1):.0f}") if step.budgeted and seconds is not None else ()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **step.environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    deadline = None if seconds is None else time.monotonic() + seconds
    command = [sys.executable, "-u", *step.command, *budget]
    with (out / f"gpu-{step.name}.txt").open("a") as kept:
        child = subprocess.Popen(
            command,
            cwd=ROOT / step.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        timer = _Timer(child, deadline)
        for line in child.stdout or ():
            sys.stdout.write(line)
            kept.write(line)
        code = child.wait()
    return UNFINISHED if timer.stop() else code


class _Timer:
    """Ends a child at a moment; stop() says whether it did."""

    def __init__(self, child: subprocess.Popen[str], deadline: float | None) -> None:
        import threading

        self._ended = False
        self._timer = None if deadline is None else threading.Timer(deadline - time.monotonic(), self._end, [child])
        if self._timer:
            self._timer.daemon = True
            self._timer.start()

    def _end(self, child: subprocess.Popen[str]) -> None:
        self._ended = True
        child.terminate()

    def stop(self) -> bool:
        if self._timer:
            self._timer.cancel()
        return self._ended


def run(
    todo: Sequence[Step], out: Path, *, seconds: float | None, again: bool = False, runner: Runner = run_step
) -> int:
    """Runs what is left. -> 0; 1 when a step failed; UNFINISHED when the time ended first."""
    out.mkdir(parents=True, exist_ok=True)
    state = State(out)
    deadline = None if seconds is None else time.monotonic() + seconds
    for step in todo:
        held = state.codes.get(step.name)
        if held == 0 or (held not in (None, UNFINISHED) and not again):
            print(
                f"bench.gpu: {step.name}: {'done' if held == 0 else f'failed before with {held}; --again repeats it'}"
            )
            continue
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left < step.least:
            print(f"bench.gpu: {step.name}: not begun, {left:.0f} s are left; the same command goes on")
            return UNFINISHED
        started = time.monotonic()
        code = runner(step, out, left)
        state.set(step.name, code)
        print(f"bench.gpu: {step.name}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
        if step.name == "ready" and code not in (0, UNFINISHED):
            return 1  # nothing else can be trusted
        if code == UNFINISHED:
            return UNFINISHED
    return 1 if any(state.codes.get(step.name, 0) for step in todo) else 0


def main(argv: list[str] | None = None) -> int:
    """-> 0; 1 when a step failed; 2 without a GPU; 3 when the time ended first."""
    import torch

    from bench.shared import folder_name
    from pyquant.measure.environment import describe_environment

    names = [step.name for step in steps(Path(), prebuilt=False, cases=1, workers=0)]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the results (default: bench/results/<gpu>)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="end after S seconds; exit code 3")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=f"of: {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="repeat steps that failed")
    parser.add_argument("--prebuilt", action="store_true", help="libraries were carried from another machine")
    parser.add_argument(
        "--cases", type=int, default=10, help="launches of a kernel, output type and mode (default: 10)"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.gpu: torch sees no CUDA device", file=sys.stderr)
        return 2
    out = (args.out or ROOT / "bench" / "results" / folder_name(describe_environment("cuda"))).resolve()
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if importlib.util.find_spec("xdist") else 0
    todo = steps(out, prebuilt=args.prebuilt, cases=args.cases, workers=workers)
    chosen = [step for step in todo if not args.only or step.name in args.only]
    return run(chosen, out, seconds=args.time_budget, again=args.again)


if __name__ == "__main__":
    sys.exit(main())
