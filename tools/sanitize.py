"""Runs the GPU tests of a few kernels under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

    python tools/sanitize.py [--tool memcheck ...] [--rows REGEX] [--all] [--seconds 120] [--time-budget 540]
                             [--out FILE] [--allow-missing]

By default memcheck and racecheck of five rows that stand for the ways the kernels are made, the likeliest to err first;
--each-family takes one row of each family, --tool the other tools. Every run is a fresh process with torch's caching
allocator off, so that an access beyond a tensor is one beyond an allocation. racecheck sees shared memory only.

Exit code 0: something was checked, all of it clean. 1: an error was found, a run was too slow, or nothing was checked
(the tool is not installed or refuses the device; --allow-missing makes that 0, and nothing is claimed). 3: the time
budget ended first; with --out the same command goes on with what is left.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
USUAL = ("memcheck", "racecheck")
UNFINISHED = 3
H200 = 90  # its compute capability
LEAST_SECONDS = 10.0  # no run is started with less left
# A family of each way the kernels are made, as a pattern: wgmma with weights from registers, decode in clusters or not,
# split K, TMA and wgmma of CUTLASS, group scales by mma.sync.
KINDS = ("sm90_s8s4_groups", "(sm90_)?decode_s8s4", "sm80_s8s8", "sm90_s8s8", "sm80_s8s4_groups")
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


def smallest_of_each_family(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The smallest tile of each family, in the order of the table."""
    smallest: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        best = smallest.get(str(row["family"]))
        if best is None or math.prod(row["tile"]) < math.prod(best["tile"]):
            smallest[str(row["family"])] = row
    return [str(row["name"]) for row in smallest.values()]


def pick(table: Sequence[Mapping[str, Any]], args: argparse.Namespace, sm: int) -> list[str]:
    """Compiled rows that the device runs: those that match, or all, or one of each family, or of each kind."""
    rows = [row for row in table if row["compiled"] and row.get("sm_min", 0) <= sm < row.get("sm_end", 1000)]
    if args.rows is not None:
        return [str(row["name"]) for row in rows if re.search(args.rows, str(row["name"]))]
    if args.all:
        return [str(row["name"]) for row in rows]
    names = smallest_of_each_family(rows)
    if args.each_family:
        return names
    family = {str(row["name"]): str(row["family"]) for row in rows}
    kinds = [next((name for name in names if re.fullmatch(kind, family[name])), None) for kind in KINDS]
    return [name for name in kinds if name is not None]


def command(sanitizer: str, tool: str, row: str) -> list[str]:
    """One row's tests under one tool."""
    options = ["--leak-check", "no"] if tool == "memcheck" else []
    return [
        sanitizer,
        "--tool",
        tool,
        *options,
        "--error-exitcode",
        str(ERROR),
        "--target-processes",
        "all",
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "../pyproject.toml",
        "--rootdir",
        "..",
        "-q",
        "-p",
        "no:cacheprovider",
        "gpu/test_gemm.py",
        "-k",
        f"test_row_equals_the_specification and {row}-",
    ]


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
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYQUANT_CASES": "3",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    try:
        done = subprocess.run(
            command(sanitizer, tool, row),
            cwd=ROOT / "tests",
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(tool, row, "too slow", (f"stopped after {seconds:g} s",))
    return judge(tool, row, done.returncode, done.stdout + done.stderr)


def _read(path: Path | None, key: str) -> dict[str, Outcome]:
    """What an earlier run of the same libraries on the same device found, but for what it did not get done."""
    if path is None or not path.exists():
        return {}
    held = json.loads(path.read_text())
    if held.get("key") != key:
        raise SystemExit(f"sanitize: {path} is of other libraries or another device: {held.get('key')!r}, not {key!r}")
    kept = [Outcome(**{**one, "lines": tuple(one["lines"])}) for one in held["outcomes"]]
    return {f"{one.tool} {one.row}": one for one in kept if one.said in ("clean", "errors")}


def _write(path: Path | None, key: str, outcomes: Sequence[Outcome]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps({"key": key, "outcomes": [asdict(one) for one in outcomes]}, indent=1) + "\n")
    fresh.replace(path)


def verdict(outcomes: Sequence[Outcome], left: int, allow_missing: bool) -> int:
    """The exit code."""
    said = [one.said for one in outcomes]
    if "errors" in said or "tests failed" in said or "too slow" in said:
        return 1
    if left:
        return UNFINISHED
    if "clean" not in said:
        print("sanitize: nothing was checked", file=sys.stderr)
        return 0 if allow_missing else 1
    return 0 if "refused" not in said or allow_missing else 1


def check(sanitizer: str, rows: Sequence[str], args: argparse.Namespace, key: str) -> tuple[list[Outcome], int]:
    """Runs what an earlier command has not. -> outcomes, and how many runs are left."""
    held, outcomes, refusing = _read(args.out, key), [], set()
    todo = [(row, tool) for row in rows for tool in args.tool]  # a row with every tool, so that a short run says most
    deadline = None if args.time_budget is None else time.monotonic() + args.time_budget
    for done, (row, tool) in enumerate(todo):
        if tool in refusing:
            continue
        outcome = held.get(f"{tool} {row}")
        if outcome is None:
            seconds = args.seconds
            if deadline is not None:
                seconds = min(seconds, deadline - time.monotonic())
                if seconds < LEAST_SECONDS:
                    return outcomes, len(todo) - done
            outcome = run(sanitizer, tool, row, seconds)
            if outcome.said == "too slow" and seconds < args.seconds:  # the budget's fault
                return outcomes, len(todo) - done
        outcomes.append(outcome)
        _write(args.out, key, outcomes)
        print(f"sanitize: {tool:9} {row}: {outcome.said}", flush=True)
        for line in outcome.lines if outcome.said != "clean" else ():
            print(f"    {line}")
        if outcome.said == "refused":
            print(f"sanitize: {tool} refuses this device; nothing was checked with it")
            refusing.add(tool)
    return outcomes, 0


def list_runs(args: argparse.Namespace) -> int:
    """Prints the runs that would be done. -> 0, or 1 when there is none."""
    sys.path.insert(0, str(ROOT))
    native = importlib.import_module("pyquant._native")
    rows = pick(native.kernel_table(), args, native.device_info(0)["sm"] if native.device_count() else H200)
    for row in rows:
        print(f"sanitize: {' '.join(args.tool)} {row}")
    return 0 if rows else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(USUAL), help="default: memcheck racecheck")
    parser.add_argument("--rows", metavar="REGEX", help="compiled rows whose name matches")
    parser.add_argument("--all", action="store_true", help="every compiled row that the device runs")
    parser.add_argument("--each-family", action="store_true", help="one row of each family")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one run (default: 120)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="end after S seconds; exit code 3")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep findings there, and go on with what it holds")
    parser.add_argument("--allow-missing", action="store_true", help="no failure where nothing can be checked")
    parser.add_argument("--list", action="store_true", help="name the runs of an H200, or of the GPU here, and end")
    args = parser.parse_args(argv)
    if args.list:
        return list_runs(args)
    sanitizer = find_tool()
    if sanitizer is None:
        print("sanitize: compute-sanitizer is not installed here; nothing was checked", file=sys.stderr)
        return 0 if args.allow_missing else 1
    sys.path.insert(0, str(ROOT))
    native = importlib.import_module("pyquant._native")
    device = native.device_info(0) if native.device_count() else {"sm": 0, "name": "no device"}
    rows = pick(native.kernel_table(), args, device["sm"])
    if not rows:
        print("sanitize: no compiled row that this device runs matches; nothing was checked", file=sys.stderr)
        return 1
    key = (
        f"{device['name']}, {native.build_info()['kernels_compiled']} kernels, cutlass {native.build_info()['cutlass']}"
    )
    outcomes, left = check(sanitizer, rows, args, key)
    clean = sum(outcome.said == "clean" for outcome in outcomes)
    print(f"sanitize: {clean} of {len(outcomes) + left} runs clean" + (f", {left} not run" if left else ""))
    return verdict(outcomes, left, args.allow_missing)


if __name__ == "__main__":
    sys.exit(main())
