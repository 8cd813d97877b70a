"""The improvers by name, in the order in which they act: smooth before quantisation, the others after calibration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn.swap import Undo
from pyquant.ptq.improve.bias_correction import bias_correction_
from pyquant.ptq.improve.gptq import gptq_
from pyquant.ptq.improve.replay import BatchToInputs
from pyquant.ptq.improve.smooth import smooth_reversibly

SMOOTH: Final = "smooth"
_AFTER: Final = {"gptq": gptq_, "bias_correction": bias_correction_}
NAMES: Final = (SMOOTH, *_AFTER)


def check_names(improve: object, data: object) -> tuple[str, ...]:
    """The names of improvers, each once. Raises ArgumentError for unknown ones and for data of one pass."""
    if isinstance(improve, str):
        raise ArgumentError("improve", repr(improve), f"a sequence of names, such as ({improve!r},)")
    names = tuple(arguments.one_of("improve", name, NAMES) for name in arguments.iterable("improve", improve, "names"))
    if len(set(names)) < len(names):
        raise ArgumentError("improve", ", ".join(names), "each name once")
    if names and data is None:
        raise ArgumentError("data", f"None, with improve={names!r}", "batches")
    if names and isinstance(data, Iterator):
        allowed = "a list or a DataLoader: every improver goes through it"
        raise ArgumentError("data", f"a {type(data).__name__}", allowed)
    return names


def improve_before(
    model: nn.Module,
    names: tuple[str, ...],
    data: Iterable[Any],
    num_batches: int,
    undo: list[Undo],
    batch_to_inputs: BatchToInputs | None,
) -> None:
    """What is done to the float model. undo  receives the steps that take it back."""
    if SMOOTH in names:
        smooth_reversibly(model, data, num_batches, 0.5, None, undo, batch_to_inputs)


def improve_after(
    model: nn.Module,
    names: tuple[str, ...],
    data: Iterable[Any],
    num_batches: int,
    batch_to_inputs: BatchToInputs | None,
) -> None:
    """What is done to a calibrated model of simulating layers."""
    for name, improver in _AFTER.items():
        if name in names:
            improver(model, data, num_batches, batch_to_inputs=batch_to_inputs)  # type: ignore[operator]
