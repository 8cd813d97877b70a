"""How far what a rounded model (or block) gives out is from what the float one does, in one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.nn import functional as F

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.ptq.improve.replay import tensors_of

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
    pairs = list(zip(tensors_of(floats), tensors_of(output), strict=True))
    if not pairs:
        raise ArgumentError("error", "'mse'", "a function: the model's output holds no floating-point tensor")
    noise = sum(float((b.double() - a.double()).square().sum()) for a, b in pairs)
    return noise / max(sum(float(a.double().square().sum()) for a, _ in pairs), 1e-300)


def kl(floats: Any, output: Any) -> float:
    """Mean KL(float || quantised) in nats over all rows of the first output."""
    if not tensors_of(floats):
        raise ArgumentError("error", "'kl'", "a function: the model's output holds no floating-point tensor")
    p, q = (F.log_softmax(tensors_of(o)[0].double(), -1).flatten(0, -2) for o in (floats, output))
    return float(F.kl_div(q, p, log_target=True, reduction="batchmean"))


def _both(floats: Any, output: Any) -> float:
    """The geometric mean of the two: neither may fall much at the cost of the other. The first where the first output
    has no rows of classes."""
    first = next(iter(tensors_of(floats)), None)
    if first is None or first.dim() < 2 or first.shape[-1] < 2:
        return relative_mse(floats, output)
    return (relative_mse(floats, output) * max(kl(floats, output), 0.0)) ** 0.5


_ERRORS: Final[dict[str, ErrorFunction]] = {"mse": relative_mse, "kl": kl, "both": _both}
