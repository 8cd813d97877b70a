"""The errors that pyquant raises; every one names what was wrong, what it was and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence


class PyquantError(Exception):
    """Base of all errors raised by pyquant."""


class ArgumentError(PyquantError, ValueError):
    """An argument has a wrong device, dtype, shape, value or type.

    argument  name of the argument, or None where a message could not be attributed to one.
    got       what it was, as text.
    allowed   what is allowed, as text.

    Example:
        >>> str(ArgumentError("scale", "float16 [3]", "float32 [3]"))
        "argument 'scale': got float16 [3]; allowed: float32 [3]"
    """

    def __init__(self, argument: str | None, got: object, allowed: object) -> None:
        self.argument = argument
        self.got = str(got)
        self.allowed = str(allowed)
        super().__init__(f"argument '{argument}': got {self.got}; allowed: {self.allowed}")


class SchemeError(ArgumentError):
    """A quantisation scheme, or a combination of its fields, that is not defined."""


class NonFiniteError(ArgumentError):
    """A scale, range or tensor holds NaN or infinity where only finite numbers are meaningful."""


class CalibrationError(PyquantError, RuntimeError):
    """A calibration run could not finish: too little data, or a layer that saw none."""


class UnsupportedError(PyquantError, RuntimeError):
    """No kernel takes the problem on this device.

    refusals  one line per kernel: its name and why it cannot take the problem, with both numbers.
    """

    def __init__(self, message: str, refusals: Sequence[str] = ()) -> None:
        self.refusals = tuple(refusals)
        super().__init__("\n  ".join([message, *self.refusals]))


class InfeasibleError(PyquantError, ValueError):
    """Nothing that was found keeps every limit.

    nearest  what comes nearest to it.
    """

    def __init__(self, message: str, nearest: object = None) -> None:
        self.nearest = nearest
        super().__init__(message)


class CheckpointError(PyquantError, RuntimeError):
    """A saved model is damaged, incomplete, unsafe or from a newer version."""


class NativeLibraryError(PyquantError, ImportError):
    """The compiled library is missing or cannot be loaded where it was asked for explicitly."""


class QuantizationWarning(UserWarning):
    """A model was quantised, but part of it stays as it was, got another scheme, or runs slower than before."""
