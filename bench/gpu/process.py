"""A step as a group of processes of its own, which ends in time, with all that it started, whatever it does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Final

from bench.gpu.steps import UNFINISHED, Step

ROOT: Final = Path(__file__).resolve().parents[2]
MARK: Final = "PYQUANT_GPU_RUN"  # in the environment of all that a run starts: the folder of its results
SPARE: Final = 20.0  # seconds between a step's own budget and its end by force
_GRACE: Final = 5.0


def run_step(step: Step, out: Path, seconds: float | None) -> int:
    """Runs one part for at most so many seconds, printing what it says and keeping it. -> its exit code, UNFINISHED
    where it was out of time."""
    budget = ("--time-budget", f"{max(seconds - SPARE, 1):.0f}") if step.budgeted and seconds is not None else ()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    with (out / f"gpu-{step.name}.txt").open("a") as kept:
        child = subprocess.Popen(
            [sys.executable, "-u", *step.command, *budget],
            cwd=ROOT / step.folder,
            env={**os.environ, **step.environment, "PYTHONPATH": path, MARK: str(out)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=_copy, args=(child.stdout, kept), daemon=True)
        reader.start()
        try:
            child.wait(None if seconds is None else max(seconds - 2 * _GRACE, 1.0))
        except subprocess.TimeoutExpired:
            _end(child)
            return UNFINISHED
        finally:
            _signal(child, signal.SIGKILL)  # what it left behind
            reader.join(_GRACE)
    if step.budgeted and child.returncode == step.unfinished:
        return UNFINISHED
    return 1 if child.returncode == UNFINISHED else child.returncode  # what only looks like it, such as pytest's own 3


def _copy(lines: IO[str], kept: IO[str]) -> None:
    for line in lines:
        sys.stdout.write(line)
        sys.stdout.flush()
        kept.write(line)
        kept.flush()


def _end(child: subprocess.Popen[str]) -> None:
    _signal(child, signal.SIGTERM)
    try:
        child.wait(_GRACE)
    except subprocess.TimeoutExpired:
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def end_leftovers(out: Path) -> int:
    """Ends what a killed run of the same folder left behind on this machine. -> how many processes.

    The caller holds the folder, so that nothing of a run that lives is found.
    """
    mark = f"{MARK}={out}".encode()
    found = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _has(pid, mark)]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    limit = time.monotonic() + _GRACE
    while any(_has(pid, mark) for pid in found) and time.monotonic() < limit:
        time.sleep(0.05)
    return len(found)


def _has(pid: int, mark: bytes) -> bool:
    try:
        return pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False
