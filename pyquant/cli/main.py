"""Parses the command line, runs one command, and turns errors into one line and an exit code.

Exit codes: 0 all is well; 1 the command ran and found a problem (a damaged file, bits that differ, a bar missed);
2 the command was called wrongly; 3 a benchmark stopped before its end; 130 interrupted; 141 nobody read its output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

from pyquant.cli.start import COMMANDS, UNREAD, top_parser
from pyquant.errors import ArgumentError, PyquantError

OK, PROBLEM, USAGE, INTERRUPTED = 0, 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; every command sets `run` to its function."""
    parser = top_parser()
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"pyquant.cli.{name}")
        parser_of_one = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser_of_one.set_defaults(run=getattr(module, "run", None))
        module.add_arguments(parser_of_one)
    return parser


# Options that are not called as the arguments that they become.
_OPTIONS = {"num_batches": "--batches", "eval_fn": "--eval"}


def _option(argument: str, given: Sequence[str]) -> str | None:
    """The option that became `argument`, if it was given."""
    option = _OPTIONS.get(argument, "--" + argument.replace("_", "-"))
    return option if any(text.split("=")[0] == option for text in given) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default sys.argv[1:]). -> exit code; argparse's usage errors raise SystemExit(2)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name of a file must not end what was done to it
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:  # a process without one
                sys.stdout.flush()  # what is written later than here fails unheard
    except BrokenPipeError:
        _leave_stdout()
        return UNREAD
    except OSError as error:
        _leave_stdout()
        print(f"pyquant: error: standard output: {error.strerror or error}", file=sys.stderr)
        return PROBLEM


def _leave_stdout() -> None:
    """What is still to be written to the standard output goes nowhere, so that the end of the process can write it."""
    with contextlib.suppress(OSError, ValueError):  # no file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        from pyquant.measure.environment import own_version

        print(f"pyquant {own_version()}")
        return OK
    if not hasattr(args, "run"):
        parser.print_help()
        return USAGE
    shown, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        return int(args.run(args))
    except BrokenPipeError:
        raise
    except ArgumentError as error:
        option = _option(error.argument or "", sys.argv[1:] if argv is None else argv)
        return _fail(args, ArgumentError(option, error.got, error.allowed) if option else error, USAGE)
    except (PyquantError, OSError) as error:
        return _fail(args, error, PROBLEM)
    except KeyboardInterrupt:
        print("pyquant: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        warnings.formatwarning = shown


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """What a user of the command line needs of a warning: not the line of our source that gave it."""
    return f"warning: {message}\n"


def _fail(args: argparse.Namespace, error: Exception, code: int) -> int:
    if args.traceback:
        import traceback

        traceback.print_exception(error)
    print(f"pyquant: error: {str(error).strip() or type(error).__name__}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
