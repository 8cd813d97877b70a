"""Options that are alike in several commands: `--formats`, names apart or between commas; `--batches`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Final

from pyquant.core import arguments

DEFAULT: Final = ("float", "int8", "int4")


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Adds --formats; `formats_of(args.formats)` reads it."""
    parser.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        help="float (the model as it is), int8, int4, presets such as W8A8Dynamic; apart or between commas; default: "
        + " ".join(DEFAULT),
    )


def formats_of(words: Sequence[str] | None) -> tuple[str, ...]:
    """The names in what followed --formats; None: the default. Commas in brackets belong to a preset."""
    if words is None:
        return DEFAULT
    names = [part.strip() for word in words for part in re.split(r",(?![^(]*\))", word)]
    return tuple(name for name in names if name)


def check_batches(args: argparse.Namespace) -> None:
    """Raise ArgumentError for a --batches that is no number of batches, before any work."""
    if args.batches is not None:
        arguments.whole("--batches", args.batches, 1)
