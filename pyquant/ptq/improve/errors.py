"""How far what a rounded model (or block) gives out is from what the float one does, in one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.nn import functional as F

from pyquant.core import arguments
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.ptq.improve.replay import Replay, counted_of_output, tensors_of

ErrorFunction = Callable[[Any, Any], float]


def error_function(error: str | ErrorFunction | None) -> ErrorFunction:
    """The function (float output, output) -> number of a name, or the one given, whose result is checked; None: 'both'.
    Raises ArgumentError."""
    if error is None:
        return _both
    if not callable(error):
        return _ERRORS[arguments.one_of("error", error, _ERRORS, " or a function (float output, output) -> float")]

    def one_number(floats: Any, output: Any) -> float:
        value: Any = error(floats, output)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            got = f"a function that returned {arguments.shown(value)}"
            raise ArgumentError("error", got, "one number") from None

    return one_number


def relative_mse(floats: Any, output: Any) -> float:
    """The squared difference of all tensors, of the squares of the float ones."""
    pairs = list(zip(counted_of_output(floats), counted_of_output(output), strict=True))
    if not pairs:
        raise ArgumentError("error", "'mse'", "a function: the model's output holds no floating-point tensor")
    noise = sum(float((b.double() - a.double()).square().sum()) for a, b in pairs)
    return noise / max(sum(float(a.double().square().sum()) for a, _ in pairs), 1e-300)


def kl(floats: Any, output: Any) -> float:
    """Mean KL(float || quantised) in nats over all rows of the first output."""
    if not tensors_of(floats):
        raise ArgumentError("error", "'kl'", "a function: the model's output holds no floating-point tensor")
    p, q = (F.log_softmax(counted_of_output(o)[0].double(), -1).flatten(0, -2) for o in (floats, output))
    if not len(p):
        return 0.0
    return float(F.kl_div(q, p, log_target=True, reduction="batchmean"))


def held_out_of(given: int | None, num_batches: int) -> int:
    """How many of the batches only judge: those given, or a quarter, at least one. Raises ArgumentError."""
    if num_batches < 2:
        raise ArgumentError("num_batches", f"{num_batches}, with this data", "at least 2: some of them only judge")
    held_out = max(1, num_batches // 4) if given is None else given
    if type(held_out) is not int or not 1 <= held_out < num_batches:
        raise ArgumentError("num_held_out", repr(held_out), f"1 to {num_batches - 1}: num_batches is {num_batches}")
    return held_out


def mean_error(replay: Replay, floats: Sequence[Any], first: int, error: ErrorFunction) -> float:
    """The mean error of the batches from `first` on; floats: the float outputs, of those batches or of all."""
    wanted = floats[len(floats) - (len(replay.batches) - first) :]
    return sum(replay.error(error, out, replay.batches[first + i]) for i, out in enumerate(wanted)) / len(wanted)


def finite(error: float) -> float:
    """The error before anything is improved: against another number nothing would be an improvement.

    Raises NonFiniteError for one that is not finite.
    """
    if not math.isfinite(error):
        what = f"batches to judge by under which the model's error is {error}"
        raise NonFiniteError("data", what, "finite inputs, under which the model's outputs are finite")
    return error


def _both(floats: Any, output: Any) -> float:
    """The geometric mean of the two: neither may fall much at the cost of the other. The first where the first output
    has no rows of classes."""
    first = next(iter(tensors_of(floats)), None)
    if first is None or first.dim() < 2 or first.shape[-1] < 2:
        return relative_mse(floats, output)
    return (relative_mse(floats, output) * max(kl(floats, output), 0.0)) ** 0.5


_ERRORS: Final[dict[str, ErrorFunction]] = {"mse": relative_mse, "kl": kl, "both": _both}
