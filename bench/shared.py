"""What several drivers share: the folder of a machine's results, means of ratios, and an allocator without page
faults, which are a cost of large activations that is not the layers' own."""

from __future__ import annotations

import ctypes
import re
import statistics
from collections.abc import Sequence

from pyquant.errors import ArgumentError
from pyquant.report.records.environment import Environment

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
