"""How much memory the C allocator has handed out: a leak shows at once, where RSS hides it for long."""

from __future__ import annotations

import ctypes
import gc

import pytest


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def in_use() -> int:
    """Bytes that the C heap has handed out and not taken back."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the C library has no mallinfo2 (glibc 2.33 has)")
    libc.mallinfo2.restype = _Mallinfo2
    gc.collect()
    told = libc.mallinfo2()
    return int(told.uordblks + told.hblkhd)
