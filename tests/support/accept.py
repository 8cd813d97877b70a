"""The acceptance rules of the suite: five tiers and no other comparison.

t0  equality                      codes, packed bytes, accumulators, histograms, plans, files
t1  bit equality of floats        integer schemes under the ordered contract; NaN where NaN, -0.0 where -0.0
t2  one ulp and no bias           integer schemes where the order of the epilogue is not fixed
t3  a bound derived from K        float products, against float64 and against torch in the same precision
t4  an interval                   accuracy of a model, paired with the float model

Every rule states the condition that must hold, so a NaN fails. A result is mistrusted (and rejected) when the reference
itself could not tell right from wrong: more than 90 % zeros, more than half at a clamp limit, or constant. Where that
is so by design, `waiver` says why. References are int64 or float64, never float32 (t1 excepted: its reference is the
executable specification).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MISTRUST_BELOW = 16  # fewer elements cannot be judged: one row of one layer may well be constant
MAX_ZERO_SHARE = 0.90
MAX_CLAMPED_SHARE = 0.50

T2_SHARE = 2e-3  # honest epilogues differ in up to 4.3e-4 of 16-bit outputs, truncation in half of them
T2_SIGNED_MEAN_ULP = 0.02  # honest: 3.1e-4; truncation: 0.5
T2_FREE = 3  # in a small output a share is no share: so many elements may differ by an ulp
T2_STEPS = 4  # roundings between accumulator and store: two scales, bias, one more when the order is free


class Rejected(AssertionError):
    """A result that a rule does not accept."""


class Mistrusted(Rejected):
    """A reference that cannot tell right from wrong."""


def t0(
    got: object, want: object, *, what: str = "", waiver: str | None = None, limits: tuple[int, int] | None = None
) -> None:
    """Equality of type, shape and every element.

    got, want  integer or bool tensors, or plain values (compared by type and ==).
    what       repeat line or other words for the report.
    waiver     why the mistrust rule does not apply, else None.
    limits     clamp limits of the codes, for the mistrust rule.
    """
    if not isinstance(want, Tensor):
        _require(type(got) is type(want) and got == want, f"T0 {what}: got {got!r}, want {want!r}")
        return
    if want.is_floating_point():
        raise TypeError("T0 is for integers; floats are compared bit by bit by t1")
    _same_form(got, want, f"T0 {what}")
    _trust(want, what, waiver, limits)
    _elementwise(got == want, got, want, f"T0 {what}")


def t1(got: Tensor, want: Tensor, *, what: str = "", waiver: str | None = None) -> None:
    """Bit equality of floats: equal patterns, and NaN (any payload) exactly where the reference has NaN."""
    if not want.is_floating_point():
        raise TypeError("T1 is for floats; integers are compared by t0")
    _same_form(got, want, f"T1 {what}")
    _trust(want, what, waiver, None)
    both_nan = got.isnan() & want.isnan()
    _elementwise((_bits(got) == _bits(want)) | both_nan, got, want, f"T1 {what}")


def t2(got: Tensor, exact: Tensor, magnitude: Tensor, *, what: str = "", waiver: str | None = None) -> None:
    """At most one ulp (and what four float32 steps may lose) from the exact value, rarely, and with no bias.

    got        float16, bfloat16 or float32.
    exact      float64, unrounded.
    magnitude  float64: abs(acc * sx * sw) + abs(bias) + abs(residual), what the float32 steps rounded.
    """
    _reference_form(got, exact, f"T2 {what}")
    _trust(exact, what, waiver, None)
    rounded = exact.to(got.dtype)
    value, ulp = got.to(torch.float64), _ulp(rounded)
    bound = ulp + T2_STEPS * 2.0**-24 * magnitude
    exceptional = ~rounded.isfinite() & (_bits(got) == _bits(rounded)) | (got.isnan() & exact.isnan())
    _elementwise(exceptional | ((value - exact).abs() <= bound), got, rounded, f"T2 {what}")
    if got.dtype == torch.float32:
        return  # several roundings of the result's own precision: most elements differ, and the bound above is the rule
    finite = rounded.isfinite() & got.isfinite()
    error = torch.where(finite, (value - rounded.to(torch.float64)) / ulp, 0.0)
    differing, count = int((error != 0).sum()), max(exact.numel(), 1)
    _require(
        differing <= T2_SHARE * count + T2_FREE,
        f"T2 {what}: {differing} of {count} elements differ from the rounded exact value; allowed {T2_SHARE:g} of all",
    )
    for name, signed in (("signed mean", error), ("mean towards zero", error * exact.sign())):
        total = abs(float(signed.sum()))
        _require(
            total <= T2_SIGNED_MEAN_ULP * count + T2_FREE,
            f"T2 {what}: {name} of {total / count:.3g} ulp; allowed {T2_SIGNED_MEAN_ULP}",
        )


def t3(
    got: Tensor,
    exact: Tensor,
    magnitude: Tensor,
    k: int,
    same_precision: Tensor,
    *,
    c: float = 1.0,
    what: str = "",
    waiver: str | None = None,
) -> None:
    """Within the error bound of a float32 sum of k products, and not much worse than torch.

    got             float16, bfloat16 or float32.
    exact           float64, unrounded.
    magnitude       float64: sum_k abs(x) * abs(w), plus abs(bias) and abs(residual).
    k               number of products, at least 1 is taken: bias and residual round too.
    same_precision  what torch gives for the same problem in the same dtype.
    c               steps per product: 1 for a product rounded once into the sum, 2 for dequantise, multiply and add.
    """
    _reference_form(got, exact, f"T3 {what}")
    _trust(exact, what, waiver, None)
    rounded, ulp = exact.to(got.dtype), _ulp(exact.to(got.dtype))
    error = (got.to(torch.float64) - exact).abs()
    exceptional = ~rounded.isfinite() & (_bits(got) == _bits(rounded)) | (got.isnan() & exact.isnan())
    bound = c * max(k, 1) * 2.0**-24 * magnitude + ulp
    _elementwise(exceptional | (error <= bound), got, rounded, f"T3 {what}")
    usual = exact.isfinite() & same_precision.isfinite() & rounded.isfinite()
    if not bool(usual.any()):
        return
    worst = float(torch.where(usual, error, 0.0).max())
    peer = float(torch.where(usual, (same_precision.to(torch.float64) - exact).abs(), 0.0).max())
    # Storing alone may cost half an ulp of the largest value, so a lucky peer does not lower the bar below that.
    allowed = 2 * max(peer, 0.5 * float(torch.where(usual, ulp, 0.0).max()))
    _require(worst <= allowed, f"T3 {what}: largest error {worst:.4g}; allowed {allowed:.4g}, twice torch's {peer:.4g}")


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences and its interval."""

    mean: float
    low: float
    high: float


def t4(
    got: Sequence[float], reference: Sequence[float], *, max_loss: float, z: float = 2.58, what: str = ""
) -> Interval:
    """Paired per-sample scores against the float model's: the loss is at most max_loss with 99 % confidence.

    got, reference  scores of the same samples in the same order (higher is better), at least 30.
    max_loss        largest mean loss allowed, >= 0, in the unit of the score.
    ->              the interval of mean(got - reference); accepted when its lower end is >= -max_loss.
    """
    _require(len(got) == len(reference) >= 30, f"T4 {what}: {len(got)} and {len(reference)} scores; needed 30 pairs")
    difference = np.asarray(got, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    mean, half = float(difference.mean()), z * float(difference.std(ddof=1)) / math.sqrt(len(difference))
    interval = Interval(mean, mean - half, mean + half)
    _require(interval.low >= -max_loss, f"T4 {what}: {interval}; allowed loss {max_loss:g}")
    return interval


# ---- what the rules share


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Rejected(message)


def _same_form(got: object, want: Tensor, what: str) -> None:
    _require(isinstance(got, Tensor), f"{what}: got {type(got).__name__}, want a tensor")
    _require(got.dtype == want.dtype, f"{what}: got {got.dtype}, want {want.dtype}")
    _require(got.shape == want.shape, f"{what}: got shape {list(got.shape)}, want {list(want.shape)}")
    _require(got.device == want.device, f"{what}: got device {got.device}, want {want.device}")


def _reference_form(got: Tensor, exact: Tensor, what: str) -> None:
    if exact.dtype != torch.float64:
        raise TypeError(f"{what}: the reference is {exact.dtype}; only float64 is exact enough")
    _require(got.shape == exact.shape, f"{what}: got shape {list(got.shape)}, want {list(exact.shape)}")


def _trust(want: Tensor, what: str, waiver: str | None, limits: tuple[int, int] | None) -> None:
    count = want.numel()
    if waiver is not None or count < MISTRUST_BELOW:
        return
    zeros = float((want == 0).sum()) / count
    if not zeros <= MAX_ZERO_SHARE:
        raise Mistrusted(f"{what}: {zeros:.1%} of the reference is zero; a test of zeros shows nothing")
    if bool((want == want.flatten()[0]).all()) or bool(want.isnan().all()):
        raise Mistrusted(f"{what}: the reference is constant")
    if limits is not None:
        clamped = float(((want == limits[0]) | (want == limits[1])).sum()) / count
        if not clamped <= MAX_CLAMPED_SHARE:
            raise Mistrusted(f"{what}: {clamped:.1%} of the reference is at a clamp limit")


_INTEGER_OF = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGER_OF[tensor.element_size()])


def _ulp(value: Tensor) -> Tensor:
    """Distance of neighbours at each value of a float dtype, as float64 (the subnormal step at and near zero)."""
    info = torch.finfo(value.dtype)
    _, exponent = torch.frexp(value.to(torch.float64).abs().clamp(info.tiny, info.max))
    return torch.from_numpy(np.ldexp(info.eps, exponent.cpu().numpy() - 1)).to(value.device)


def _elementwise(holds: Tensor, got: Tensor, want: Tensor, what: str) -> None:
    if bool(holds.all()):
        return
    wrong = (~holds).nonzero()
    at = tuple(wrong[0].tolist())
    raise Rejected(
        f"{what}: {len(wrong)} of {holds.numel()} elements; first at {list(at)}: "
        f"got {_shown(got[at])}, want {_shown(want[at])}"
    )


def _shown(element: Tensor) -> str:
    value = element.item()
    if not element.is_floating_point():
        return f"{value} (0x{int(value) & (256 ** element.element_size() - 1):x})"
    if element.dtype == torch.float64:
        return f"{value!r} (0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016x})"
    width = element.element_size()
    return f"{value!r} (0x{int(_bits(element.reshape(1)).item()) & (256**width - 1):0{2 * width}x})"
