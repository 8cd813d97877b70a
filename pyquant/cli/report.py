"""`pyquant report`: any saved record as Markdown, CSV, pictures and a page for the browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyquant.errors import ArgumentError
from pyquant.report import registry
from pyquant.report.records.record import load_record

_EXAMPLES = """\
examples:
  pyquant report results/trade_off.json --out report
  pyquant report results/*.json --out report --format md html

Each FILE is a record that a pyquant command saved (`--out`, `--json`). Files of OUT are called after it: trade_off.md,
trade_off.html ... Pictures need matplotlib; a page needs nothing but a browser, and no network.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Renders saved records in every format that their kind has, or in those that are named."
    parser.epilog = _EXAMPLES
    parser.add_argument("files", nargs="+", metavar="FILE", help="a saved record (JSON)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder that is written")
    parser.add_argument("--format", nargs="+", metavar="FORMAT", help="json md csv png svg html (default: all it has)")


def run(args: argparse.Namespace) -> int:
    """Writes the files and prints their names. All records are read before the first file is written. -> 0."""
    forms = None if args.format is None else tuple(dict.fromkeys(args.format))
    records: dict[Path, Any] = {Path(name): load_record(name) for name in args.files}
    stems = [path.stem for path in records]
    for stem in stems:
        if stems.count(stem) > 1:
            raise ArgumentError(
                "FILE", f"two files called {stem}", "different names: files of OUT are called after them"
            )
    for record in records.values():
        if missing := [form for form in forms or () if form not in registry.formats_of(record)]:
            registry.render(record, missing[0])  # says what this kind has
    for path, record in records.items():
        written, left_out = (
            registry.write_possible(record, args.out, path.stem)
            if forms is None
            else (registry.write(record, args.out, path.stem, forms), "")
        )
        for line in [*(f"wrote {file}" for file in written), *filter(None, [left_out])]:
            print(line)
    return 0
