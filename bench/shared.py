"""What several drivers share: the folder of a machine's results, means of ratios, what a driver that writes after every
piece of work does around it, and an allocator without page faults, which are a cost of large activations that is not
the layers' own."""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from pyquant.core import arguments
from pyquant.errors import ArgumentError, PyquantError, UnsupportedError
from pyquant.report.records.environment import FAKED, Environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_ONE_GIB, _TOP_PAD = 1 << 30, 256 << 20


def keep_freed_memory() -> bool:
    """Make this process keep freed memory instead of giving it back to the system, as servers' allocators do.

    Why: with the defaults a forward pass whose activations exceed a few MB may give them back and fault them in again
    on every call, or not, depending on what else the process allocated. That adds the same milliseconds to
    every candidate, and so hides ratios.

    ->  True where the C library took the settings (glibc), False elsewhere. They last as long as the process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not glibc
        return False
    settings = ((_M_MMAP_THRESHOLD, _ONE_GIB), (_M_TRIM_THRESHOLD, _ONE_GIB), (_M_TOP_PAD, _TOP_PAD))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)


def folder_name(environment: Environment) -> str:
    """A folder name for results of this machine: 'cpu-intel-xeon-processor', 'nvidia-h200'."""
    name = environment.gpu.split(",")[0] if environment.gpu else f"cpu {environment.cpu}"
    name = re.sub(r"\((?:r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers; ArgumentError when there are none or one is not positive."""
    if not values or min(values) <= 0:
        raise ArgumentError("values", list(values), "at least one, all positive")
    return statistics.geometric_mean(values)


def exit_code(driver: str, run: Callable[[list[str] | None], int], argv: list[str] | None) -> int:
    """What the driver's run returns; 2 and a line for what it refuses."""
    try:
        return run(argv)
    except PyquantError as error:
        print(f"{driver}: {error}", file=sys.stderr)
        return 2


def device_for(clock: str | None) -> str:
    """'cuda', for a dry run 'cpu'. Raises UnsupportedError without a GPU."""
    if clock == FAKED:
        return "cpu"
    if not torch.cuda.is_available():
        raise UnsupportedError("torch sees no CUDA device")
    return "cuda"


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ArgumentError where one of these options, a number or several, is below 1."""
    for name in names:
        value = getattr(args, name)
        for one in value if isinstance(value, list) else [value]:
            arguments.whole(f"--{name}", one, 1)


def reason_of(error: Exception) -> str:
    """The first line of an error, or its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def follow(driver: str, steps: Iterable[str], report: Any, markdown: Callable[[Any], str], out: Path) -> None:
    """Says each step that fills the report, and writes the report after it: a killed run keeps what it did.

    driver  such as 'bench.decoder', which writes decoder.md and decoder.json.
    report  a dataclass as figures_of takes it; markdown(report) is its page, which is printed at the end.
    """
    stem = driver.rpartition(".")[2]
    paths: list[Path] = []
    for said in steps:
        print(f"{driver}: {said}", flush=True)
        paths = [
            write_text(out / f"{stem}.md", markdown(report)),
            save_record(out / f"{stem}.json", figures_of(report)),
        ]
    print(markdown(report))
    print(f"wrote {', '.join(map(str, paths))}")
