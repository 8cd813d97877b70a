"""Whether the integer layers of a model are quicker than float ones, on this machine, at the shapes of an example."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.modes import evaluating, own_random_numbers
from pyquant.core.names import listed
from pyquant.errors import ArgumentError, NativeLibraryError, QuantizationWarning
from pyquant.nn.experts import QExperts
from pyquant.nn.flow import Calls, call, first_given
from pyquant.nn.obstacles import has_hooks
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear
from pyquant.nn.whole_layer import WRAPPERS, without, wrappers_of
from pyquant.ops import layer_time, plan
from pyquant.ops.plan import Device

_ROUNDS: Final = (3, 50)  # at least, at most
_SHOWN: Final = 5
SHORT_ROWS: Final = 256  # codes in a patch; longer ones were quicker in integers on every CPU that was measured
_PIXELS: Final = 28
MOST_WEIGHTS: Final = 2**20  # of a weight-only Linear that is timed unasked
_ROWS: Final = (1, 32)
_CLEARLY: Final = 0.9  # of the float layer's speed: an unasked warning must not be noise
_at_rows: dict[Any, list[LayerSpeed]] = {}  # of a kind of weight-only Linear, at _ROWS, in this process
_timed: dict[Any, tuple[float, float]] = {}  # seconds of a kind of convolution and of its float twin, in this process


@dataclass(frozen=True)
class LayerSpeed:
    """One quantised layer and its float twin, both with the input that the example gave it.

    name           of the layer in the model.
    shape          of its input.
    quantised_us, float_us   best of several interleaved calls, microseconds of the wall clock.
    """

    name: str
    shape: tuple[int, ...]
    quantised_us: float
    float_us: float

    @property
    def ratio(self) -> float:
        """Speed of the quantised layer in units of the float one's: below 1 it is slower."""
        return self.float_us / self.quantised_us


def compare_speed(model: nn.Module, example_inputs: object, *, seconds: float = 2.0) -> list[LayerSpeed]:
    """Time every QLinear and QConv2d against the float layer of the same weights, in the model's own shapes.

    A layer is timed as the model calls it: with the transform of a HadamardLinear, which the float layer beside it has
    no need of.

    model           with quantised layers; it is run once, in evaluation mode and without gradients.
    example_inputs  a tensor or other single argument, a tuple of arguments, or a mapping of keyword arguments.
    seconds         of measuring altogether, about; every pair of layers runs three times at least.
    ->              one record a layer that was called with a float tensor, the slowest ratio first. Layers of one shape
                    and scheme are measured once, experts of a bank, which is one call, not at all.
    Raises ArgumentError for a model without quantised layers, and for seconds that are not above 0.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> from pyquant import quantize_
        >>> model = quantize_(nn.Sequential(nn.Linear(64, 64)), W8A8Dynamic())
        >>> [(s.name, s.shape) for s in compare_speed(model, torch.zeros(4, 64), seconds=0.01)]
        [('0', (4, 64))]
    """
    arguments.module("model", model)
    arguments.number("seconds", seconds, 0, above=True)
    return _compared(model, example_inputs, seconds)[0]


def _compared(model: nn.Module, example_inputs: object, seconds: float) -> tuple[list[LayerSpeed], set[str]]:
    """The records of compare_speed, and the names of all layers that were called."""
    given, reached = _inputs_of(model, example_inputs)
    groups: dict[Any, list[str]] = {}
    for name, (layer, x) in given.items():
        key = (type(layer), str(layer), x.shape, x.stride(), x.dtype, x.device)
        groups.setdefault(key, []).append(name)
    speeds = []
    for names in groups.values():
        layer, x = given[names[0]]
        quantised, real = best_of(layer, _twin(layer, x.dtype).to(x.device), x, seconds / len(groups))
        speeds += [LayerSpeed(name, tuple(x.shape), quantised * 1e6, real * 1e6) for name in names]
    return sorted(speeds, key=lambda one: one.ratio), reached


def unreached(model: nn.Module, reached: Collection[str]) -> list[str]:
    """Names of the quantised layers that are not among those that were called; experts belong to their bank's call."""
    banks = in_banks(model)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, (QLinear, QConv2d))]
    return [name for name, layer in layers if id(layer) not in banks and name not in reached]


# What it means that a layer was not called.
UNREACHED: Final = (
    "these inputs do not reach them, or another module multiplies by their weights itself, in floating point "
    "(pyquant.trace_floats tells)"
)


def short_convolutions(model: nn.Module, seconds: float = 0.2) -> list[LayerSpeed]:
    """Time the convolutions that integers make slower most often: on a CPU, with fewer than SHORT_ROWS codes a patch.

    Each kind is timed once in a process, on one image of 28 x 28 pixels (or as large as its kernel); kinds that the
    seconds do not suffice for are left out. -> one record a layer that was timed, the slowest ratio first.
    """
    start, speeds = perf_counter(), []
    for name, layer in model.named_modules():
        if not (isinstance(layer, QConv2d) and layer.scheme.is_integer and layer.in_features < SHORT_ROWS):
            continue
        is_whole = layer.missing is None and 0 not in (layer.in_features, layer.out_features)
        if layer.storage.device.type != "cpu" or not is_whole or has_hooks(layer):  # hooks are for the user's calls
            continue
        spans = [d * (k - 1) + 1 for d, k in zip(layer.patches.dilation, layer.patches.kernel_size, strict=True)]
        shape = (1, layer.in_channels, *(max(_PIXELS, span) for span in spans))
        key = (layer.patches, layer.in_channels, layer.out_features, layer.scheme, layer.dtype, torch.get_num_threads())
        if key not in _timed:
            if perf_counter() - start > seconds:
                continue
            x = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(
                layer.dtype
            )
            _timed[key] = best_of(layer, layer.to_float(x.dtype), x, seconds / 20)
        quantised, real = _timed[key]
        speeds.append(LayerSpeed(name, shape, quantised * 1e6, real * 1e6))
    return sorted(speeds, key=lambda one: one.ratio)


def small_weight_only(model: nn.Module, seconds: float = 0.2) -> list[LayerSpeed]:
    """Time the weight-only Linears of a CPU at 1 and 32 rows; -> the better of the two.

    The smallest first, up to MOST_WEIGHTS, each kind once in a process; kinds that the seconds do not suffice for are
    left out. -> one record a layer that was timed, the slowest ratio first.
    """
    start, speeds, wrappers, banks = perf_counter(), [], wrappers_of(model.modules()), in_banks(model)
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, QLinear))
    named = [(name, layer) for name, layer in layers if id(layer) not in banks]
    for name, layer in sorted(named, key=lambda one: one[1].in_features * one[1].out_features):
        is_weight_only = not layer.scheme.is_integer and not layer.scheme.is_float and layer.missing is None
        if not is_weight_only or not 0 < layer.in_features * layer.out_features <= MOST_WEIGHTS:
            continue
        whole = wrappers.get(id(layer), layer)
        if layer.storage.device.type != "cpu" or has_hooks(layer) or has_hooks(whole):
            continue
        key = (str(whole), layer.dtype, torch.get_num_threads())
        if key not in _at_rows:
            if perf_counter() - start > seconds:
                break
            _at_rows[key] = [_at(whole, layer, rows, seconds / 40) for rows in _ROWS]
        best = max(_at_rows[key], key=lambda one: one.ratio)
        speeds.append(replace(best, name=name))
    return sorted(speeds, key=lambda one: one.ratio)


def _at(whole: nn.Module, layer: QLinear, rows: int, budget: float) -> LayerSpeed:
    x = torch.rand(
        (rows, layer.in_features), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(layer.dtype)
    quantised, real = best_of(whole, _twin(whole, x.dtype), x, budget)
    return LayerSpeed("", (rows, layer.in_features), quantised * 1e6, real * 1e6)


def slower_by_plan(
    layers: Mapping[str, QLinear], device: Device, only_compiled: bool = True
) -> list[tuple[LayerSpeed, str]]:
    """16-bit Linears that the plan knows to be clearly slower than torch's, whatever the number of rows: the best they
    reach, with the source of the figures. Nothing is run; what a wrapper does first would only add to it."""
    found = []
    for name, layer in layers.items():
        if layer.dtype not in layer_time.HALVES or layer.scheme.is_float or layer.scheme.outputs is not None:
            continue
        sizes = (layer.scheme, layer.out_features, layer.in_features)
        times = []
        for rows in plan.MANY_ROWS:
            ours, theirs = layer_time.beside(*sizes, rows, layer.dtype, device, only_compiled=only_compiled)
            times.append((LayerSpeed(name, (rows, layer.in_features), ours.us, theirs.us), ours.source))
        best = max(times, key=lambda one: one[0].ratio)
        if best[0].ratio < _CLEARLY:
            found.append(best)
    return found


def _known_by_plan(model: nn.Module) -> list[tuple[LayerSpeed, str]]:
    """slower_by_plan for the layers of a model, each on its own GPU; none without the kernel table."""
    on: dict[torch.device, dict[str, QLinear]] = {}
    banks = in_banks(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QLinear) and id(layer) not in banks and layer.storage.device.type == "cuda":
            on.setdefault(layer.storage.device, {})[name] = layer
    try:
        return [one for where, layers in on.items() for one in slower_by_plan(layers, Device.of(where))]
    except NativeLibraryError:
        return []


def warn_of_speed(model: nn.Module, check_speed: object, stacklevel: int = 4) -> None:
    """One QuantizationWarning with the figures of the layers that are slower than in floating point, if any are.

    check_speed  as in quantize_: example inputs to time the model with, None for what is known or quickly timed, False.
    """
    if check_speed is False:
        return
    if check_speed is None:
        images, rows = short_convolutions(model), small_weight_only(model)
        convolutions, linears = ([one for one in timed if one.ratio < _CLEARLY] for timed in (images, rows))
        planned = _known_by_plan(model)
        slow = sorted([*convolutions, *linears, *(one for one, _ in planned)], key=lambda one: one.ratio)
        counts = ((convolutions, "convolutions"), (linears, "weight-only Linears"), (planned, "Linears on a GPU"))
        count = " and ".join(f"{len(some)} {what}" for some, what in counts if some)
        looks = [f"timed on one image of {_PIXELS} x {_PIXELS}"] if convolutions else []
        looks += [f"timed at {' and '.join(map(str, _ROWS))} rows"] if linears else []
        looks += sorted({f"at every number of rows, {source}" for _, source in planned})
        how = f"{', '.join(looks)}; check_speed=batch times the model's own shapes, False none"
    else:
        speeds, reached = _compared(model, check_speed, 2.0)
        if quiet := unreached(model, reached):
            text = f"quantize_: {len(quiet)} quantised layers were not called: {listed(quiet, _SHOWN)}: {UNREACHED}"
            warnings.warn(text, QuantizationWarning, stacklevel=stacklevel)
        slow = [one for one in speeds if one.ratio < 1]
        whole = sum(s.float_us for s in speeds) / (sum(s.quantised_us for s in speeds) or 1)
        count, how = f"{len(slow)} of {len(speeds)} layers", f"all layers together: {whole:.2f}x"
    if not slow:
        return
    lines = [
        f"{s.name} {list(s.shape)} {s.quantised_us:.0f} us against {s.float_us:.0f} us ({s.ratio:.2f}x)" for s in slow
    ]
    advice = "None in the config leaves a layer as it is, pyquant.auto_ all that lose"
    text = (
        f"quantize_: {count} are slower in integers than in floating point on this machine ({how}): "
        f"{listed(lines, _SHOWN, '; ')}. {advice}"
    )
    warnings.warn(text, QuantizationWarning, stacklevel=stacklevel)


def _inputs_of(model: nn.Module, example_inputs: object) -> tuple[dict[str, tuple[Any, Tensor]], set[str]]:
    """{name: (layer as the model calls it, its first float input)} of every quantised layer that is reached with one,
    and the names of all that are reached."""
    seen: dict[str, tuple[Any, Tensor]] = {}
    reached: set[str] = set()
    banks = in_banks(model)

    def note(name: str, layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x = first_given(args, kwargs)
        reached.add(name)
        if id(layer) not in banks and isinstance(x, Tensor) and x.is_floating_point():
            seen.setdefault(name, (layer, x.detach()))

    each_call(model, example_inputs, note)
    return seen, reached


def in_banks(model: nn.Module) -> set[int]:
    """The ids of the layers of experts: a bank multiplies by all of them in one call, of which a call for each, and a
    float layer beside it, say nothing."""
    return {id(layer) for bank in model.modules() if isinstance(bank, QExperts) for layer in bank.modules()}


def each_call(model: nn.Module, example_inputs: object, note: Callable[..., None]) -> None:
    """Run a model once, in evaluation mode and without gradients; note(name, layer, args, kwargs) is told of every call
    of a quantised layer.

    A layer that another module wraps is noted with the call of that module, as `layer`, under its own name: what it
    gets inside is neither what the model has nor, with a hook on it, what it would get without.
    Raises ArgumentError for a model without such layers.
    """
    if not any(isinstance(module, (QLinear, QConv2d)) for module in model.modules()):
        raise ArgumentError("model", f"a {type(model).__name__} without quantised layers", "one that quantize_ changed")

    wrappers = wrappers_of(model.modules())

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        layer: Any = module.linear if isinstance(module, WRAPPERS) else module
        if isinstance(layer, (QLinear, QConv2d)) and wrappers.get(id(layer), layer) is module:
            note(calls.names[id(layer)], module, args, kwargs)

    calls = Calls(model, entered)
    with torch.no_grad(), evaluating(model), own_random_numbers(model), calls.watched():
        call(model, example_inputs)


def _twin(layer: Any, dtype: torch.dtype) -> nn.Module:
    """The float layer of the same weights, without what a wrapper needs for the sake of its codes."""
    inner: Any = layer.linear if isinstance(layer, WRAPPERS) else layer
    real: nn.Module = inner.to_float(dtype)
    return real if inner is layer else without(layer, real)


def best_of(layer: nn.Module, twin: nn.Module, x: Tensor, budget: float) -> tuple[float, float]:
    """Seconds of the best call of each, taken in turns."""
    best = [float("inf"), float("inf")]
    with torch.inference_mode():
        for module in (layer, twin):
            module(x)
        start, rounds = perf_counter(), 0
        while rounds < _ROUNDS[0] or (rounds < _ROUNDS[1] and perf_counter() - start < budget):
            for index, module in enumerate((layer, twin)):
                best[index] = min(best[index], _seconds(module, x))
            rounds += 1
    return best[0], best[1]


def _seconds(module: nn.Module, x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start = perf_counter()
    module(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return max(perf_counter() - start, 1e-9)
