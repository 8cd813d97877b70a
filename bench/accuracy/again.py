"""Whether the tables of accuracy in the documentation come out again from their commands, to the printed digit.

    python -m bench.accuracy.again [--only weight_ranges tried ...] [--jobs N] [--keep DIR]

Runs each command into a copy of its page and prints what differs. On a machine other than the one that a table names,
or with another torch or Python (whose library is the text), other digits are no fault: sums of float products come out
in another order, and training ends elsewhere. Such a machine is only named; --only runs a command all the same.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.markers import get
from pyquant.measure.environment import describe_environment

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Page:
    """A command, the page that it writes, and the markers of what it puts there, the first of which names the machine
    unless `machine` does; jobs, keeps: whether it has these options."""

    path: str
    module: str
    markers: tuple[str, ...]
    jobs: bool = True
    keeps: bool = True
    machine: str = ""


PAGES: Final = {
    "accuracy": Page("docs/accuracy.md", "bench.accuracy", ("goals", "recovered", "bytemlp", "gpt3", "digits")),
    "tried": Page("docs/accuracy.md", "bench.accuracy.tried", ("tried",), jobs=False, keeps=False, machine="goals"),
    "weight_ranges": Page("docs/calibration.md", "bench.accuracy.weight_ranges", ("weight_ranges",)),
    "rotated": Page("docs/rotation.md", "bench.accuracy.rotated", ("rotated",)),
    "learned_rotation": Page("docs/rotation.md", "bench.accuracy.learned_rotation", ("learned_rotation",)),
    "equalized": Page("docs/reconstruction.md", "bench.accuracy.equalized", ("equalized",)),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy.again", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(PAGES), help="these, on whatever machine")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--keep", metavar="DIR", help="keep finished seeds here: a run that was stopped goes on")
    args = parser.parse_args(argv)
    status = 0
    for name in args.only or PAGES:
        page = PAGES[name]
        if not args.only and (other := _other_machine(page)):
            print(f"{name}: not run: {page.path} was written on another machine: {other}")
            continue
        lines = _differing(name, page, args.jobs, args.keep)
        print(f"{name}: {page.path} {'differs:' if lines else 'comes out again'}")
        print(*lines, sep="\n", end="\n" if lines else "")
        status |= bool(lines)
    return int(status)


def _other_machine(page: Page) -> str:
    """The machine that a page's table names, where it is not this one; threads and pyquant's version apart."""
    first = get(ROOT / page.path, page.machine or page.markers[0]).partition("\n")[0]
    ours = describe_environment("cpu", clock="none: nothing is timed").line()
    return first if "; " in first and _facts(first) != _facts(ours) else ""


def _facts(line: str) -> list[str]:
    return [part for part in line.split("; ") if not part.startswith("pyquant ") and not part.endswith("cores used")]


def _differing(name: str, page: Page, jobs: int, keep: str | None) -> list[str]:
    """The lines of the page's tables, and those that come out instead."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.md"
        shutil.copy(ROOT / page.path, copy)
        command = [sys.executable, "-m", page.module, "--docs", str(copy)]
        command += ["--jobs", str(jobs)] if page.jobs else []
        command += ["--keep", str(Path(keep) / f"{name}.journal")] if keep and page.keeps else []
        command += ["--out", folder] if name == "accuracy" else []
        found = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        if found.returncode not in (0, 1):  # 1: a goal is missed
            return [f"{' '.join(command)}: exit status {found.returncode}"]
        before, after = (
            [_line(line) for m in page.markers for line in get(p, m).splitlines()] for p in (ROOT / page.path, copy)
        )
        return list(difflib.unified_diff(before, after, page.path, "now", lineterm="", n=0))


def _line(line: str) -> str:
    return "; ".join(_facts(line)) if "; " in line and not line.startswith("|") else line


if __name__ == "__main__":
    sys.exit(main())
