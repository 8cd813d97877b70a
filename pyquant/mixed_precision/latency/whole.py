"""Whole configurations side by side: what is promised of a plan is measured as the model really runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pyquant.errors import ArgumentError
from pyquant.measure.timing import Clock, using_threads
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.latency.in_place import samples_in_place
from pyquant.mixed_precision.latency.isolated import whole_samples
from pyquant.mixed_precision.latency.measure import clock_of, example_of
from pyquant.mixed_precision.latency.samples import Effort, ProgressCall, Samples, Task, median_interval, silent
from pyquant.mixed_precision.latency.timers import StampClock


def measure_configurations(
    switchable: SwitchableModel,
    configs: Sequence[Config],
    example_inputs: Any = None,
    *,
    rounds: int = 40,
    min_rounds: int = 8,
    max_seconds: float = 60.0,
    tolerance: float = 0.01,
    clock: str | StampClock | Clock | None = None,
    threads: int | None = None,
    seed: int = 0,
    progress: ProgressCall | None = None,
) -> dict[Config, tuple[float, float, float]]:
    """Microseconds of the whole model in each configuration, in interleaved rounds of one run.

    configs  indices of formats, one for each group; at least one.
    ->       {configuration: (median, low, high)}, the interval being that of the median (95 %). What slows a whole
             round alike is taken out of all of them. Other arguments as in measure_latency.
    Raises ArgumentError for no or wrong configurations; the model is as before, also after an exception.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        >>> switchable = SwitchableModel(model, ("float", "W8A8Dynamic"))
        >>> found = measure_configurations(switchable, [(0, 0), (1, 0)], torch.randn(8, 16), rounds=2, min_rounds=2)
        >>> [low <= median <= high for median, low, high in found.values()]
        [True, True]
    """
    effort = Effort(rounds, min_rounds, max_seconds, tolerance)
    checked = list(dict.fromkeys(switchable.check(config) for config in configs))
    if not checked:
        raise ArgumentError("configs", "none", "at least one configuration")
    task = Task(switchable, *example_of(switchable, example_inputs), effort, seed, progress or silent)
    with using_threads(threads), torch.inference_mode():
        timer = clock_of(clock, switchable)
        if isinstance(timer, StampClock):
            samples = samples_in_place(task, [], checked, timer)
        else:
            samples = whole_samples(task, checked, timer, Samples())
    steady = samples.steadied()
    return {config: median_interval([us for _, us in steady.totals[config]]) for config in checked}
