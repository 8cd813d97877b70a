"""Turns what torch raises around an op into pyquant's errors."""

from __future__ import annotations

import re
from typing import NoReturn

import torch

from pyquant.errors import ArgumentError, NonFiniteError, PyquantError, UnsupportedError

_OURS = re.compile(r"argument '([^']+)': got (.*?); allowed: ([^\n]*)", re.DOTALL)
_CUT = re.compile(r"argument '([^']+)': got (.*)$")
_TYPE = re.compile(r"Not yet supported ScalarType (\w+)")
_SCHEMA = re.compile(r"Expected a value of type '([^']+)' for argument '([^']+)' but instead found type '([^']+)'")
_POSITION = re.compile(r"argument '?(\w+)'? .*must be (.*), not (.*)$", re.MULTILINE)
_MISSING = re.compile(r"missing value for argument '([^']+)'")
_BACKEND = re.compile(r"Could not run '(pyquant::\w+)' with arguments from the '(\w+)' backend")
_NO_MEMORY = re.compile(r"pyquant: out of memory: (\d+) bytes on (\S+)")
_UNSUPPORTED = re.compile(r"pyquant: no kernel (.*?)(?:\nException raised from|$)", re.DOTALL)


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
    if match := _CUT.search(text):  # a message in C ends at a null
        argument, got = match.groups()
        raise ArgumentError(argument, got, "text without null characters") from None
    if match := _TYPE.search(text):
        raise ArgumentError("out_dtype", match.group(1), "a torch.dtype") from None
    if match := _SCHEMA.search(text):
        allowed, argument, got = match.groups()
        raise ArgumentError(argument, f"a value of type {got}", f"a value of type {allowed}") from None
    if match := _MISSING.search(text):
        raise ArgumentError(match.group(1), "nothing", "a value (it has no default)") from None
    if match := _POSITION.search(text):
        argument, allowed, got = match.groups()
        raise ArgumentError(argument, got, allowed) from None
    if match := _BACKEND.search(text):
        got = f"device or layout with backend {match.group(2)}"
        raise ArgumentError(first_argument, got, "a dense CPU or CUDA tensor") from None
    if "There were no tensor arguments" in text:
        raise ArgumentError(first_argument, "None", "a tensor") from None
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
