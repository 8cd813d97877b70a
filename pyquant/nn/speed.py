"""Whether the integer layers of a model are quicker than float ones, on this machine, at the shapes of an example."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.names import listed
from pyquant.errors import ArgumentError, QuantizationWarning
from pyquant.nn.flow import Calls, call
from pyquant.nn.obstacles import has_hooks
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear

_ROUNDS: Final = (3, 50)  # at least, at most
_SHOWN: Final = 5
SHORT_ROWS: Final = 256  # codes in a patch; longer ones were quicker in integers on every CPU that was measured
_PIXELS: Final = 28
_CLEARLY: Final = 0.9  # of the float layer's speed: an unasked warning must not be noise
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

    model           with quantised layers; it is run once, without gradients, in the mode that it is in.
    example_inputs  a tensor or other single argument, a tuple of arguments, or a mapping of keyword arguments.
    seconds         of measuring altogether, about; every pair of layers runs three times at least.
    ->              one record a layer that was called with a float tensor, the slowest ratio first. Layers of one shape
                    and scheme are measured once.
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
    given = _inputs_of(model, example_inputs)
    groups: dict[Any, list[str]] = {}
    for name, (layer, x) in given.items():
        key = (type(layer), str(layer), x.shape, x.stride(), x.dtype, x.device)
        groups.setdefault(key, []).append(name)
    speeds = []
    for names in groups.values():
        layer, x = given[names[0]]
        twin = layer.to_float(x.dtype).to(x.device)
        quantised, real = _best_of(layer, twin, x, seconds / len(groups))
        speeds += [LayerSpeed(name, tuple(x.shape), quantised * 1e6, real * 1e6) for name in names]
    return sorted(speeds, key=lambda one: one.ratio)


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
            x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(layer.dtype)
            _timed[key] = _best_of(layer, layer.to_float(x.dtype), x, seconds / 20)
        quantised, real = _timed[key]
        speeds.append(LayerSpeed(name, shape, quantised * 1e6, real * 1e6))
    return sorted(speeds, key=lambda one: one.ratio)


def warn_of_speed(model: nn.Module, check_speed: object, stacklevel: int = 4) -> None:
    """One QuantizationWarning with the figures of the layers that are slower than in floating point, if any are.

    check_speed  as in quantize_: example inputs to time the model with, None for a short look at convolutions, False.
    """
    if check_speed is False:
        return
    if check_speed is None:
        slow = [one for one in short_convolutions(model) if one.ratio < _CLEARLY]
        count = f"{len(slow)} convolutions"
        how = f"timed on one image of {_PIXELS} x {_PIXELS}; check_speed=batch times the model's own shapes, False none"
    else:
        speeds = compare_speed(model, check_speed)
        slow = [one for one in speeds if one.ratio < 1]
        whole = sum(s.float_us for s in speeds) / (sum(s.quantised_us for s in speeds) or 1)
        count, how = f"{len(slow)} of {len(speeds)} layers", f"all layers together: {whole:.2f}x"
    if not slow:
        return
    lines = [
        f"{s.name} {list(s.shape)} {s.quantised_us:.0f} us against {s.float_us:.0f} us ({s.ratio:.2f}x)" for s in slow
    ]
    text = (
        f"quantize_: {count} are slower in integers than in floating point on this machine ({how}): "
        f"{listed(lines, _SHOWN, '; ')}. None in the config leaves a layer as it is"
    )
    warnings.warn(text, QuantizationWarning, stacklevel=stacklevel)


def _inputs_of(model: nn.Module, example_inputs: object) -> dict[str, tuple[Any, Tensor]]:
    """{name: (layer, its first float input)} of every quantised layer that the example reaches."""
    if not any(isinstance(module, (QLinear, QConv2d)) for module in model.modules()):
        raise ArgumentError("model", f"a {type(model).__name__} without quantised layers", "one that quantize_ changed")
    seen: dict[str, tuple[Any, Tensor]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], _: object) -> None:
        is_float = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if is_float and isinstance(module, (QLinear, QConv2d)):
            seen.setdefault(calls.names[id(module)], (module, args[0].detach()))

    calls = Calls(model, note)
    with torch.no_grad(), calls.watched():
        call(model, example_inputs)
    return seen


def _best_of(layer: nn.Module, twin: nn.Module, x: Tensor, budget: float) -> tuple[float, float]:
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
