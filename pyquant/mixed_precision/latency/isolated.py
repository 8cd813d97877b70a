"""Layers timed alone, on the inputs that the model gives them: for a GPU, whose clock cannot be read between layers.

A layer and the whole model are replayed as CUDA graphs between two events. The weights of a layer rotate over copies
that hold as much memory as the whole model, up to more than the second-level cache: between two calls of a layer the
rest of the model has passed through that cache. Its inputs do not rotate: what made them has left them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.measure.gpu_timing import ROTATE_BYTES, Rotating, copies_beyond_cache, copies_of, held_bytes
from pyquant.measure.timing import Clock, time_interleaved
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.choices.watch import hooked
from pyquant.mixed_precision.latency.samples import Samples, Task

GRAPH_CLOCKS: Final = ("cuda-graph", "cuda-events")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def isolated_samples(task: Task, whole: Sequence[Config], make_clock: Callable[[], Clock]) -> Samples:
    """Readings of every layer alone, and of the whole model in the configurations.

    make_clock  a new clock for each layer: a clock of graphs keeps them, and their memory, as long as it lives.
    """
    switchable, effort, samples = task.switchable, task.effort, Samples()
    calls = layer_calls(switchable, task.args, task.kwargs)
    total = len(calls) + effort.rounds
    for done, (name, g) in enumerate(switchable.group_of.items(), 1):
        formats = [f for f, good in enumerate(switchable.allowed[g]) if good]
        timings = time_interleaved(
            {str(f): rotating(switchable, name, f, calls[name]) for f in formats},
            clock=make_clock(),
            rounds=effort.rounds,
            budget_s=effort.max_seconds / (len(calls) + 1),
            seed=task.seed,
        )
        for f in formats:
            samples.isolated[name, f] = [seconds * 1e6 for seconds in timings.samples[str(f)]]
        task.tell(done, total, name)
    last = replace(task, tell=lambda n, _, what: task.tell(len(calls) + n, total, what))
    return whole_samples(last, whole, make_clock(), samples)


def layer_calls(switchable: SwitchableModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, list[Call]]:
    """{layer: arguments of each of its calls} in one forward of the model in its first quantised configuration."""
    config = switchable.uniform(1)
    chosen = switchable.chosen(config)
    calls: dict[str, list[Call]] = {name: [] for name in chosen}

    def watch(name: str) -> Callable[..., None]:
        return lambda _, a, k: calls[name].append((_kept(a), _kept(k)))

    watched = [(switchable.called(name, f), watch(name)) for name, f in chosen.items()]
    with hooked(watched, before=True), switchable.using(config):
        switchable.model(*args, **kwargs)
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
    layer = switchable.alone(name, format)
    everything = sum(held_bytes(switchable.layer(n, format)) for n in switchable.group_of)
    count = copies_beyond_cache(held_bytes(layer), min(everything, ROTATE_BYTES))
    return Rotating([partial(_run, copy, calls) for copy in copies_of(layer, count)])


def _run(layer: nn.Module, calls: Sequence[Call]) -> object:
    return [layer(*args, **kwargs) for args, kwargs in calls]


def whole_samples(task: Task, configs: Sequence[Config], clock: Clock, samples: Samples) -> Samples:
    """The model as a whole in every configuration as well, interleaved, within the time of one layer more."""
    runs = {config: partial(task.switchable.model, *task.args, **task.kwargs) for config in configs}  # graphs go by it
    for round_, config in task.rounds(list(runs), samples, "whole model"):
        with task.switchable.using(config):
            clock.seconds(runs[config], 1)  # the caches are as this configuration leaves them
            samples.totals[config].append((round_, clock.seconds(runs[config], 1) * 1e6))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return samples
