"""Which form of a layer is the quicker one for the calls that an example makes: integers, floats, or each at its rows.

On a GPU the plan knows both (pyquant/ops/layer_time.py); on a CPU, and where the plan does not know, both are timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.nn.dequantize import float_of
from pyquant.nn.nested import tokens_of
from pyquant.nn.qlinear import QLinear
from pyquant.nn.speed import best_of, each_call, in_banks
from pyquant.nn.whole_layer import WRAPPERS, without
from pyquant.ops import layer_time
from pyquant.ops.plan import Device

INTEGERS: Final = "integers"
FLOATS: Final = "floats"
BOTH: Final = "both"
_HERE: Final = "timed here"


@dataclass(frozen=True)
class CallTime:
    """Calls of one layer with inputs of one shape.

    rows   of a call: tokens, or output pixels.   shape   of the input.   count   calls in the example.
    quantised_us, float_us   microseconds of one call.   source   'timed here', or whose figure the plan's is.
    """

    rows: int
    shape: tuple[int, ...]
    count: int
    quantised_us: float
    float_us: float
    source: str

    @property
    def ratio(self) -> float:
        """Speed of the quantised layer in units of the float one's: below 1 it is slower."""
        return self.float_us / self.quantised_us if self.quantised_us else 1.0


@dataclass(frozen=True)
class LayerChoice:
    """What became of one quantised layer, and why.

    name     of the layer.    scheme  that it has or had.
    form     'integers', 'floats', or 'both': each at the numbers of rows at which it is quicker.
    calls    the figures; empty where nothing was compared.   reason   in words.
    extra_bytes  of real weights held beside the codes ('both').
    rows_in_floats  (first, last) numbers of rows that run in floats ('both').
    """

    name: str
    scheme: str
    form: str
    reason: str
    calls: tuple[CallTime, ...] = ()
    extra_bytes: int = 0
    rows_in_floats: tuple[tuple[int, float], ...] = ()

    @property
    def quantised_us(self) -> float:
        """Microseconds of all calls in integers."""
        return sum(call.count * call.quantised_us for call in self.calls)

    @property
    def float_us(self) -> float:
        """Microseconds of all calls in floats."""
        return sum(call.count * call.float_us for call in self.calls)

    @property
    def us(self) -> float:
        """Microseconds of all calls in the form that was chosen."""
        if self.form == BOTH:
            return sum(call.count * min(call.quantised_us, call.float_us) for call in self.calls)
        return self.float_us if self.form == FLOATS else self.quantised_us


@dataclass
class _Seen:
    """Calls of one layer. whole: it, or the wrapper that the model calls; shapes: {(shape, stride, dtype): how often};
    left: why its form is not open."""

    whole: Any
    shapes: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], int] = field(default_factory=dict)
    left: str = ""

    @property
    def layer(self) -> Any:
        """The layer that is quantised."""
        return self.whole.linear if isinstance(self.whole, WRAPPERS) else self.whole


def judge(
    model: nn.Module,
    examples: Sequence[object],
    *,
    device: Device | None = None,
    measure: bool = False,
    seconds: float = 2.0,
    tolerance: float = 0.0,
) -> list[LayerChoice]:
    """One choice for every quantised layer of a model, in the model's order; nothing is changed.

    examples   inputs of the model, run one after another; the times of their calls add up.
    device     a GPU to plan for that is not here; None: where the layers are.
    measure    time the layers also where the plan knows.    seconds   of timing altogether, about.
    tolerance  an integer layer that is slower by at most this part of the float one's time stays.
    """
    seen = _calls_of(model, examples)
    timed: dict[Any, tuple[float, float]] = {}
    kinds = {_kind(one, key) for one in seen.values() if not one.left for key in one.shapes}
    budget = seconds / max(1, len(kinds))
    return [_choice(name, one, device, measure, budget, tolerance, timed) for name, one in seen.items()]


def _calls_of(model: nn.Module, examples: Sequence[object]) -> dict[str, _Seen]:
    calls: dict[str, _Seen] = {}

    def note(name: str, layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        seen = calls.setdefault(name, _Seen(layer))
        x, *more = *args, *kwargs.values()
        if not isinstance(x, Tensor) or not x.is_floating_point():
            seen.left = "takes codes from the layer before"
        elif any(value is not None for value in more):
            seen.left = "adds a residual itself"
        else:
            x = tokens_of(x)
            key = (x.shape, x.stride(), x.dtype)
            seen.shapes[key] = seen.shapes.get(key, 0) + 1

    for example in examples:
        each_call(model, example, note)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    banks = in_banks(model)
    for seen in calls.values():
        if id(seen.layer) in banks:
            seen.left = "its bank of experts is one call, which no layer is timed in"
        elif seen.layer.scheme.outputs is not None:
            seen.left = "gives codes to the layer behind"
        elif seen.layer.scheme.is_float:
            seen.left = "runs in 16 bits already"
    return dict(sorted(calls.items(), key=lambda item: order[item[0]]))


def _choice(
    name: str,
    seen: _Seen,
    device: Device | None,
    measure: bool,
    budget: float,
    tolerance: float,
    timed: dict[Any, tuple[float, float]],
) -> LayerChoice:
    choice = LayerChoice(name, str(seen.layer.scheme), INTEGERS, f"not compared: {seen.left}")
    if seen.left:
        return choice
    calls = []
    for key, count in seen.shapes.items():
        call = _time_of(seen, key, count, device, measure, budget, timed)
        if call is None:
            what = "steps before a layer" if seen.whole is not seen.layer else "convolutions"
            return replace(choice, reason=f"not compared: the plan knows no {what}, and this is another device")
        calls.append(call)
    calls.sort(key=lambda call: call.rows)
    choice = replace(choice, calls=tuple(calls))
    if choice.quantised_us <= choice.float_us * (1 + tolerance):
        return replace(choice, reason=_said(choice, "no slower than in floats"))
    return replace(choice, form=FLOATS, reason=_said(choice, "slower in integers"))


def _time_of(
    seen: _Seen,
    key: tuple[torch.Size, tuple[int, ...], torch.dtype],
    count: int,
    device: Device | None,
    measure: bool,
    budget: float,
    timed: dict[Any, tuple[float, float]],
) -> CallTime | None:
    """The times of calls of one shape: the plan's for 16-bit Linears of a GPU, else from the clock. None: unknown."""
    shape, stride, dtype = key
    layer = seen.layer
    where = layer.storage.device
    is_linear = isinstance(layer, QLinear)
    rows = math.prod(shape[:-1]) if is_linear else _pixels(layer, shape)
    is_known = is_linear and seen.whole is layer  # the plan has no figures of what a wrapper does
    is_planned = is_known and not measure and (where.type == "cuda" and dtype in layer_time.HALVES)
    if device is not None or is_planned:
        if not is_known:
            return None
        half = dtype if dtype in layer_time.HALVES else torch.bfloat16
        target = Device.of(where) if device is None else device
        sizes = (layer.scheme, layer.out_features, layer.in_features, rows, half, target)
        ours, theirs = layer_time.beside(*sizes, only_compiled=device is None)
        return CallTime(rows, tuple(shape), count, ours.us, theirs.us, ours.source)
    kind = _kind(seen, key)
    if kind not in timed:
        own = torch.Generator(where).manual_seed(0)  # the caller's random numbers are not drawn
        x = torch.empty_strided(shape, stride, dtype=dtype, device=where).uniform_(generator=own)
        twin = float_of(layer, [""], {})
        twin = twin if seen.whole is layer else without(seen.whole, twin)
        timed[kind] = best_of(seen.whole, twin.to(device=where, dtype=dtype), x, budget)
    quantised, real = timed[kind]
    return CallTime(rows, tuple(shape), count, quantised * 1e6, real * 1e6, _HERE)


def _kind(seen: _Seen, key: tuple[Any, ...]) -> tuple[Any, ...]:
    """What layers have in common that take the same time with inputs of one kind; repr() shows scheme and geometry."""
    return (type(seen.layer), str(seen.whole), seen.layer.storage.device, *key)


def _pixels(layer: Any, shape: torch.Size) -> int:
    """Rows of a convolution's product: its output pixels."""
    return math.prod((*shape[:-3], *layer.patches.out_size(*shape[-2:])))


def _said(choice: LayerChoice, verdict: str) -> str:
    """The verdict with the figures of every number of rows."""
    sources = sorted({call.source for call in choice.calls})
    figures = ", ".join(_figures(call) for call in choice.calls)
    return f"{verdict}: {figures} ({', '.join(sources)})"


def _figures(call: CallTime) -> str:
    return f"{call.quantised_us:.1f} us against {call.float_us:.1f} us at {call.rows} rows ({call.ratio:.2f}x)"


def with_both_forms(
    choices: Iterable[LayerChoice], layers: Mapping[str, Any], spare_bytes: float, device: Device | None = None
) -> list[LayerChoice]:
    """The choices, where layers that are quicker in integers at some rows and in floats at others have both forms, as
    far as the bytes reach: what saves most a byte comes first. device: as in judge.

    layers  {name: the layer as the model calls it}; one within a wrapper has one form: floats need no wrapper.
    """
    choices = list(choices)
    gains = {}
    for place, choice in enumerate(choices):
        both = _both(choice, layers[choice.name], device)
        if both is not None:
            gains[place] = both
    for place in sorted(gains, key=lambda place: -(choices[place].us - gains[place].us) / gains[place].extra_bytes):
        both = gains[place]
        if both.extra_bytes <= spare_bytes:
            spare_bytes -= both.extra_bytes
            choices[place] = both
        else:
            unmet = f"; both forms would take {both.extra_bytes} bytes more than the spare_bytes that are left"
            choices[place] = replace(choices[place], reason=choices[place].reason + unmet)
    return choices


def _both(choice: LayerChoice, layer: Any, device: Device | None) -> LayerChoice | None:
    gained: dict[int, float] = {}  # by floats, at every number of rows
    for call in choice.calls:
        gained[call.rows] = gained.get(call.rows, 0.0) + call.count * (call.quantised_us - call.float_us)
    verdicts = [(rows, us > 0) for rows, us in sorted(gained.items())]
    if not isinstance(layer, QLinear) or len({is_float for _, is_float in verdicts}) < 2:
        return None
    size = layer.in_features * layer.out_features * layer.dtype.itemsize
    reason = _said(choice, f"each form at the rows at which it is quicker, for {size} bytes")
    if _HERE not in {call.source for call in choice.calls}:
        verdicts = _by_plan(layer, Device.of(layer.storage.device) if device is None else device, device is None)
    return replace(choice, form=BOTH, reason=reason, extra_bytes=size, rows_in_floats=_spans(verdicts))


def _by_plan(layer: Any, device: Device, only_compiled: bool) -> list[tuple[int, bool]]:
    """(rows, whether floats are quicker) at the ends of the spans on which the plan says the same."""
    half = layer.dtype if layer.dtype in layer_time.HALVES else torch.bfloat16
    sizes = (layer.scheme, layer.out_features, layer.in_features)
    verdicts: list[tuple[int, bool]] = []
    first = 1
    for last in layer_time.buckets():
        ours, theirs = layer_time.beside(*sizes, last, half, device, only_compiled=only_compiled)
        verdicts += [(first, theirs.us < ours.us), (last, theirs.us < ours.us)]
        first = last + 1
    return verdicts


def _spans(verdicts: Sequence[tuple[int, bool]]) -> tuple[tuple[int, float], ...]:
    """(first, last) numbers of rows that go to floats: a number in between follows the nearer one, by its logarithm.

    Example:
        >>> _spans([(1, False), (4096, True)])
        ((65, inf),)
    """
    spans: list[tuple[int, float]] = []
    first = 0
    for place, (rows, is_float) in enumerate(verdicts):
        end = place + 1 == len(verdicts)
        last = math.inf if end else max(rows, math.isqrt(max(rows, 1) * verdicts[place + 1][0]))
        if is_float and spans and spans[-1][1] + 1 == first:
            spans[-1] = (spans[-1][0], last)
        elif is_float:
            spans.append((first, last))
        first = 0 if end else int(last) + 1
    return tuple(spans)
