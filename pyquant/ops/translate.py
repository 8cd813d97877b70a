"""Calls of ops, and what torch raises around them as pyquant's errors."""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

import torch

from pyquant.errors import ArgumentError, NonFiniteError, PyquantError, UnsupportedError
from pyquant.ops import values, zero_points

_OURS = re.compile(r"argument '([^']+)': got (.*?); allowed: ([^\n]*)", re.DOTALL)
# What torch says of an argument -> its name ("": the op's first tensor), what it was, what is allowed.
_MEANINGS: Final = tuple(
    (re.compile(pattern, re.MULTILINE), argument, got, allowed)
    for pattern, argument, got, allowed in (
        # a message in C ends at a null
        (r"argument '([^']+)': got (.*)\n?\Z", r"\1", r"\2", "text without null characters"),
        (r"Not yet supported ScalarType (\w+)", "out_dtype", r"\1", "a torch.dtype"),
        (
            r"Expected a value of type '([^']+)' for argument '([^']+)' but instead found type '([^']+)'",
            r"\2",
            r"a value of type \3",
            r"a value of type \1",
        ),
        (r"missing value for argument '([^']+)'", r"\1", "nothing", "a value (it has no default)"),
        (r"argument '?(\w+)'? .*must be (.*), not (.*)$", r"\1", r"\3", r"\2"),
        (
            r"Could not run 'pyquant::\w+' with arguments from the '(\w+)' backend",
            "",
            r"device or layout with backend \1",
            "a dense CPU or CUDA tensor",
        ),
        (r"There were no tensor arguments", "", "None", "a tensor"),
    )
)
_NO_MEMORY = re.compile(r"pyquant: out of memory: (\d+) bytes on (\S+)")
_UNSUPPORTED = re.compile(r"pyquant: no kernel (.*?)(?:\nException raised from|$)", re.DOTALL)


def call(op: Any, *args: Any) -> Any:
    """An op with its arguments, and with a look at zero points where set_checks(True) asks for it."""
    if values.checks_enabled():
        zero_points.check(op._schema.name.removeprefix("pyquant::"), args, {})
    try:
        return op(*args)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reraise(error, op._schema.arguments[0].name)


def reraise(error: Exception, first_argument: str = "x") -> NoReturn:
    """Raise the pyquant error that says what `error` says; memory that ran out is torch.OutOfMemoryError, and anything
    else that is not about arguments passes unchanged.

    first_argument  name of the op's first tensor, which decides where the op runs.
    """
    if isinstance(error, PyquantError) or torch.compiler.is_compiling():
        raise error  # torch 2.14, tracing, shows handlers the errors of ops, but follows no exception's constructor
    text = str(error)
    if match := _OURS.search(text):
        kind = NonFiniteError if match.group(3).startswith("finite values") else ArgumentError
        raise kind(*match.groups()) from None
    for pattern, argument, got, allowed in _MEANINGS:
        if match := pattern.search(text):
            argument, got, allowed = map(match.expand, (argument, got, allowed))
            raise ArgumentError(argument or first_argument, got, allowed) from None
    if match := _UNSUPPORTED.search(text):
        first, *rest = match.group(1).strip().splitlines()
        raise UnsupportedError(f"no kernel {first}", [line.strip() for line in rest]) from None
    if match := _NO_MEMORY.search(text):
        _out_of_memory(int(match.group(1)), match.group(2))
    raise error


def _out_of_memory(nbytes: int, device: str) -> NoReturn:
    """What torch raises for such an allocation, class and text: the stable ABI loses both, so it is repeated.

    On the CPU torch raises a bare RuntimeError, which batch-size finders recognise by its text.
    """
    message = f"pyquant: out of memory: tried to allocate {nbytes} bytes on {device}"
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if device != "cpu":
            raise  # the device has failed, not its memory
        message = f"{message}: {error}"
    raise torch.OutOfMemoryError(message) from None
