"""`pyquant doctor`: the report of pyquant.doctor(), as text or as JSON."""

from __future__ import annotations

import argparse
import json

from pyquant.diagnosis import doctor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tells what runs natively on this machine, what does not and why, and tests every scheme's bits "
        "against the specification. Exit code 1 when something is wrong."
    )
    parser.epilog = "examples:\n  pyquant doctor\n  pyquant doctor --json > doctor.json"
    parser.add_argument("--json", action="store_true", help="print the whole diagnosis as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis. -> 0, or 1 when there is a problem."""
    diagnosis = doctor()
    print(json.dumps(diagnosis.to_dict(), indent=1) if args.json else diagnosis)
    return 0 if diagnosis.ok else 1
