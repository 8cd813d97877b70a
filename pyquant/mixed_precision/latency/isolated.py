"""Layers timed alone, on the inputs that the model gives them: for a GPU, whose clock cannot be read between layers.

A layer and the whole model are replayed as CUDA graphs between two events. The weights of a layer rotate over copies
that hold as much memory as the whole model, up to more than the second-level cache: between two calls of a layer the
rest of the model has passed through that cache. Its inputs do not rotate: what made them has left them there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.measure.gpu_timing import ROTATE_BYTES, Rotating, copies_beyond_cache, copies_of, held_bytes
from pyquant.measure.timing import Clock, time_interleaved
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.latency.samples import Config, Effort, ProgressCall, Samples

GRAPH_CLOCKS: Final = ("cuda-graph", "cuda-events")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def isolated_samples(
    switchable: SwitchableModel,
    whole: Sequence[Config],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    make_clock: Callable[[], Clock],
    effort: Effort,
    seed: int,
    progress: ProgressCall,
) -> tuple[Samples, int]:
    """Readings of every layer alone, and of the whole model in the configurations. -> samples, rounds of the latter.

    make_clock  a new clock for each layer: a clock of graphs keeps them, and their memory, as long as it lives.
    """
    calls = layer_calls(switchable, args, kwargs)
    total, samples = len(calls) + effort.rounds, Samples()
    for done, (name, g) in enumerate((name, g) for g, group in enumerate(switchable.groups) for name in group.layers):
        formats = [f for f, good in enumerate(switchable.allowed[g]) if good]
        candidates = {str(f): rotating(switchable, name, f, calls[name]) for f in formats}
        timings = time_interleaved(
            candidates, clock=make_clock(), rounds=effort.rounds, budget_s=effort.max_seconds / (len(calls) + 1),
            seed=seed,
        )  # fmt: skip
        for f in formats:
            samples.isolated[name, f] = [seconds * 1e6 for seconds in timings.samples[str(f)]]
        progress(done + 1, total, name)

    def report(n: int, _: int, what: str) -> None:
        progress(len(calls) + n, total, what)

    return samples, whole_samples(switchable, whole, args, kwargs, make_clock(), effort, seed, samples, report)


def layer_calls(switchable: SwitchableModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, list[Call]]:
    """{layer: arguments of each of its calls} in one forward of the model in its first quantised configuration."""
    calls: dict[str, list[Call]] = {name: [] for group in switchable.groups for name in group.layers}
    config = switchable.uniform(1)
    handles = []
    try:
        for group, f in zip(switchable.groups, config, strict=True):
            for name in group.layers:

                def seen(module: nn.Module, a: Any, k: Any, name: str = name) -> None:
                    calls[name].append((_kept(a), _kept(k)))

                handles.append(switchable.layer(name, f).register_forward_pre_hook(seen, with_kwargs=True))
        with switchable.using(config):
            switchable.model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _kept(value: Any) -> Any:
    """A copy of the tensors: the model may write over its own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _kept(v) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_kept, value)) if type(value) is tuple else value
    return value


def rotating(switchable: SwitchableModel, name: str, format: int, calls: Sequence[Call]) -> Rotating:
    """A layer in a format, on copies of its weights that hold as much as all layers in that format."""
    layer = switchable.layer(name, format)
    everything = sum(held_bytes(switchable.layer(n, format)) for group in switchable.groups for n in group.layers)
    count = copies_beyond_cache(held_bytes(layer), min(everything, ROTATE_BYTES))
    return Rotating([partial(_run, copy, calls) for copy in copies_of(layer, count)])


def _run(layer: nn.Module, calls: Sequence[Call]) -> object:
    return [layer(*args, **kwargs) for args, kwargs in calls]


def whole_samples(
    switchable: SwitchableModel,
    configs: Sequence[Config],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    clock: Clock,
    effort: Effort,
    seed: int,
    samples: Samples,
    progress: ProgressCall,
) -> int:
    """The model as a whole in every configuration, interleaved, within the time of one layer more."""
    runs = {config: partial(switchable.model, *args, **kwargs) for config in configs}  # one each: graphs go by it
    order, rng, started = list(runs), random.Random(seed), time.perf_counter()
    done = 0
    while not effort.is_enough(done, started, samples):
        rng.shuffle(order)
        for config in order:
            with switchable.using(config):
                clock.seconds(runs[config], 1)  # the caches are as this configuration leaves them
                samples.totals[config].append((done, clock.seconds(runs[config], 1) * 1e6))
        done += 1
        progress(done, effort.rounds, "whole model")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return done
