"""Whether the integer layers of a model are quicker than float ones, on this machine, at the shapes of an example."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.errors import ArgumentError, QuantizationWarning
from pyquant.nn.flow import call
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear

_ROUNDS: Final = (3, 50)  # at least, at most
_SHOWN: Final = 5


@dataclass(frozen=True)
class LayerSpeed:
    """One quantised layer beside its float twin, both with the input that the example gave it.

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
        >>> from pyquant.nn.convert import quantize_
        >>> model = quantize_(nn.Sequential(nn.Linear(64, 64)), W8A8Dynamic())
        >>> [(s.name, s.shape) for s in compare_speed(model, torch.zeros(4, 64), seconds=0.01)]
        [('0', (4, 64))]
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ArgumentError("seconds", repr(seconds)[:80], "a finite number above 0")
    given = _inputs_of(model, example_inputs)
    groups: dict[Any, list[str]] = {}
    for name, (layer, x) in given.items():
        key = (type(layer), str(layer), x.shape, x.stride(), x.dtype, x.device)
        groups.setdefault(key, []).append(name)
    found = []
    for names in groups.values():
        layer, x = given[names[0]]
        twin = layer.to_float(x.dtype).to(x.device)
        quantised, real = _best_of(layer, twin, x, seconds / len(groups))
        found += [LayerSpeed(name, tuple(x.shape), quantised * 1e6, real * 1e6) for name in names]
    return sorted(found, key=lambda one: one.ratio)


def warn_of_slow_layers(speeds: list[LayerSpeed], stacklevel: int = 3) -> None:
    """One QuantizationWarning with the figures of the layers that are slower than in floating point; none: silence."""
    slow = [one for one in speeds if one.ratio < 1]
    if not slow:
        return
    lines = [
        f"{s.name} {list(s.shape)} {s.quantised_us:.0f} us against {s.float_us:.0f} us ({s.ratio:.2f}x)"
        for s in slow[:_SHOWN]
    ]
    more = f" and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
    whole = sum(s.float_us for s in speeds) / sum(s.quantised_us for s in speeds)
    text = (
        f"quantize_: {len(slow)} of {len(speeds)} layers are slower in integers than in floating point on this machine "
        f"(all layers together: {whole:.2f}x): {'; '.join(lines)}{more}. None in the config leaves a layer as it is"
    )
    warnings.warn(text, QuantizationWarning, stacklevel=stacklevel)


def _inputs_of(model: nn.Module, example_inputs: object) -> dict[str, tuple[Any, Tensor]]:
    """{name: (layer, its first float input)} of every quantised layer that the example reaches."""
    seen: dict[str, tuple[Any, Tensor]] = {}
    handles = []

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                seen.setdefault(name, (layer, args[0].detach()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (QLinear, QConv2d)):
            handles.append(module.register_forward_pre_hook(watch(name)))
    if not handles:
        raise ArgumentError("model", f"a {type(model).__name__} without quantised layers", "one that quantize_ changed")
    try:
        with torch.no_grad():
            call(model, example_inputs)
    finally:
        for handle in handles:
            handle.remove()
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
