"""What the command line says without a command: answered before torch is imported, which takes seconds.

`import pyquant.cli.start` is the first line of the package: where this process is the command itself and is asked for
nothing but its help or its version, it answers and leaves. It imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from typing import Any, Final, NoReturn

VERSION: Final = "0.1.0"
USAGE: Final = 2
UNREAD: Final = 141  # the reader of the output has gone

# Each is a module of this package with add_arguments(parser) and run(args).
COMMANDS: Final = {
    "doctor": "environment, native library, GPUs, and a self-test of every scheme",
    "calibrate": "find the ranges of static schemes from data",
    "sensitivity": "find which layers suffer by which format",
    "latency": "measure what every layer costs in every format",
    "search": "find a format for every layer",
    "quantize": "quantise a model and save it",
    "convert": "read a quantised checkpoint of another tool and save it as one of pyquant",
    "export": "write a saved model as an ONNX file, and show what onnxruntime makes of it",
    "inspect": "layers, schemes, sizes and kernels of a saved model",
    "verify": "check a saved model: bytes, bits, and error against the float model",
    "error": "errors of every layer of a saved model on data",
    "bench": "measure: `pyquant bench gemm|mlp|decode|qat|calib`",
    "tune": "measure the quickest kernels for your layers on your GPU",
    "report": "render saved results: Markdown, CSV, PNG, SVG, HTML",
}

_EXAMPLES = """\
examples:
  pyquant doctor
  pyquant quantize mypackage.models:build --scheme W8A8Dynamic --out quantised
  pyquant calibrate mypackage.models:build --data mypackage.data:batches --recipe recipe.yaml
  pyquant sensitivity mypackage.models:build --data mypackage.data:batches --max-drop 0.01
  pyquant search mypackage.models:build --data mypackage.data:batches --eval mypackage.data:accuracy
  pyquant convert ./llama-gptq ./llama-pyquant
  pyquant inspect quantised
  pyquant verify quantised --against mypackage.models:build
  pyquant bench gemm --m 1 64 --kn 1024x4096 --schemes W8A8Dynamic W4A8Dynamic
  pyquant tune --model quantised --m 1 16 64 512
  pyquant report results/trade_off.json --out report

exit codes: 0 all is well, 1 a problem was found, 2 called wrongly, 3 a benchmark stopped before its end,
130 interrupted, 141 nobody read the output
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the word that was meant where one is near. Commands have its kind."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # said here, by the parser that knows its options
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message}{self._meant(message)} (see {self.prog} --help)\n")

    def _meant(self, message: str) -> str:
        if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            words = [word.partition("=")[0] for word in unknown[1].split() if word.startswith("-")]
            names = list(self._option_string_actions)
        elif choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
            words, names = [choice[1]], [name.strip("' ") for name in choice[2].split(",")]
        else:
            return ""
        near = [match for word in words for match in difflib.get_close_matches(word, names, 1)]
        return f"; did you mean {' '.join(near)}?" if near else ""


def top_parser() -> Parser:
    """The parser of the options before the command."""
    parser = Parser(
        prog="pyquant",
        description="Quantise PyTorch models to int8 and int4: integer products, the same bits on every device.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from, not one line only")
    return parser


def outline() -> argparse.ArgumentParser:
    """The whole parser as its help shows it: commands without their options."""
    parser = top_parser()
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def answer(words: list[str], program: str) -> str | None:
    """What to print for these words after the name of the program, or None where a command is wanted.

    program  sys.argv[0]: the path of the installed `pyquant`, or '-m' while `python -m pyquant` looks for it.
    """
    before = sys.orig_argv[: len(sys.orig_argv) - len(words)]
    is_module = program == "-m" and before[-2:] == ["-m", "pyquant"]
    if not is_module and os.path.basename(program) not in ("pyquant", "pyquant.exe"):
        return None
    if words == ["--version"]:
        return f"pyquant {VERSION}\n"
    return outline().format_help() if words in ([], ["-h"], ["--help"]) else None


_told = answer(sys.argv[1:], sys.argv[0]) if getattr(sys, "argv", None) else None
if _told is not None and sys.stdout is not None:
    try:
        sys.stdout.write(_told)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(UNREAD) from None
        sys.stderr.write(f"pyquant: error: standard output: {error.strerror}\n")
        raise SystemExit(1) from None
    raise SystemExit(0 if sys.argv[1:] else USAGE)
