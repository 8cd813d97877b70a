"""The C library's allocator and its page faults: a cost of large activations that is not the layers' own."""

from __future__ import annotations

import ctypes

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
