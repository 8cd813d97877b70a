"""Paths as arguments of public functions."""

from __future__ import annotations

import os
from pathlib import Path

from pyquant.errors import ArgumentError


def file_path(argument: str, value: object) -> Path:
    """The path that an argument names. Raises ArgumentError for anything but text or a path of text without NUL."""
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str) and text and "\0" not in text:
            return Path(text)
    raise ArgumentError(
        argument, f"{type(value).__name__} {value!r}"[:120], "a path: text or os.PathLike, without null"
    )
