"""Runs the GPU tests of a few kernels under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

    python tools/sanitize.py [--tool memcheck ...] [--rows REGEX] [--all] [--seconds 120]

One row of each family by default, each in a fresh process with torch's caching allocator off, so that an access beyond
a tensor is one beyond an allocation. racecheck sees shared memory only. Where the tool is not installed, or refuses
the device, this says so and exits with 0: nothing was checked, and nothing is claimed. Exit code 1 for an error found.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
ERROR = 86  # compute-sanitizer's exit code for its own findings, as asked for below
REFUSED = re.compile(r"Device not supported|not supported on this|Unable to find|Failed to initialize", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """What one run said: 'clean', 'errors', 'refused', 'tests failed', 'too slow'; with the lines that matter."""

    tool: str
    row: str
    said: str
    lines: tuple[str, ...] = ()


def find_tool() -> str | None:
    """compute-sanitizer from the PATH or from where CUDA is installed."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))


def pick(table: Sequence[Mapping[str, Any]], pattern: str | None, everything: bool) -> list[str]:
    """Compiled rows: those that match, or all, or the smallest tile of each family."""
    rows = [row for row in table if row["compiled"]]
    if pattern is not None:
        return [str(row["name"]) for row in rows if re.search(pattern, str(row["name"]))]
    if everything:
        return [str(row["name"]) for row in rows]
    smallest: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        size = row["tile"][0] * row["tile"][1] * row["tile"][2]
        best = smallest.get(str(row["family"]))
        if best is None or size < best["tile"][0] * best["tile"][1] * best["tile"][2]:
            smallest[str(row["family"])] = row
    return [str(row["name"]) for row in smallest.values()]


def command(sanitizer: str, tool: str, row: str) -> list[str]:
    """One row's tests under one tool."""
    options = ["--leak-check", "no"] if tool == "memcheck" else []
    return [
        sanitizer, "--tool", tool, *options, "--error-exitcode", str(ERROR), "--target-processes", "all",
        sys.executable, "-m", "pytest", "-c", "../pyproject.toml", "--rootdir", "..", "-q", "-p", "no:cacheprovider",
        "gpu/test_gemm.py", "-k", f"test_row_equals_the_specification and {row}-",
    ]  # fmt: skip


def judge(tool: str, row: str, code: int, output: str) -> Outcome:
    """What an exit code and an output mean."""
    lines = tuple(line for line in output.splitlines() if line.startswith("=========") and line.strip("= "))
    if REFUSED.search(output):
        return Outcome(tool, row, "refused", lines[:3])
    if code == ERROR or re.search(r"ERROR SUMMARY: [1-9]", output):
        return Outcome(tool, row, "errors", lines[:40])
    if code != 0:
        return Outcome(tool, row, "tests failed", tuple(output.splitlines()[-15:]))
    return Outcome(tool, row, "clean")


def run(sanitizer: str, tool: str, row: str, seconds: float) -> Outcome:
    environment = {
        **os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYQUANT_CASES": "3", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    try:
        done = subprocess.run(
            command(sanitizer, tool, row), cwd=ROOT / "tests", env=environment, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(tool, row, "too slow", (f"stopped after {seconds:g} s",))
    return judge(tool, row, done.returncode, done.stdout + done.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--rows", metavar="REGEX", help="compiled rows whose name matches")
    parser.add_argument("--all", action="store_true", help="every compiled row")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one run (default: 120)")
    args = parser.parse_args(argv)
    sanitizer = find_tool()
    if sanitizer is None:
        print("sanitize: compute-sanitizer is not installed here; nothing was checked")
        return 0
    sys.path.insert(0, str(ROOT))
    rows = pick(importlib.import_module("pyquant._native").kernel_table(), args.rows, args.all)
    if not rows:
        print("sanitize: no compiled row matches; nothing was checked", file=sys.stderr)
        return 1
    outcomes = []
    for tool in args.tool:
        for row in rows:
            outcome = run(sanitizer, tool, row, args.seconds)
            outcomes.append(outcome)
            print(f"sanitize: {tool:9} {row}: {outcome.said}", flush=True)
            for line in outcome.lines if outcome.said != "clean" else ():
                print(f"    {line}")
            if outcome.said == "refused":
                print(f"sanitize: {tool} refuses this device; nothing was checked with it")
                break
    clean = sum(outcome.said == "clean" for outcome in outcomes)
    print(f"sanitize: {clean} of {len(outcomes)} runs clean")
    return 1 if any(outcome.said in ("errors", "tests failed") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
