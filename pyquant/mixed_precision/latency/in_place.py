"""Layers timed where they are, inside of forwards of the whole model: for a CPU, whose clock can be read anywhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from pyquant.mixed_precision.choices.switchable import Config
from pyquant.mixed_precision.latency.samples import Forward, Samples, Task
from pyquant.mixed_precision.latency.timers import Stamp, StampClock, overhead_ns, stamping

_SAMPLE_S: Final = 0.002  # a sample repeats short models until it lasts about this long
_MOST_CALLS: Final = 25
Reading = tuple[int, int, list[Stamp]]  # of a forward: began, ended, its layers


def samples_in_place(task: Task, design: Sequence[Config], whole: Sequence[Config], clock: StampClock) -> Samples:
    """Readings of `design` with timers inside and of `whole` without."""
    switchable, now = task.switchable, clock.now_ns
    model, args, kwargs = switchable.model, task.args, task.kwargs
    names, formats = list(switchable.group_of.items()), range(len(switchable.formats))
    layers = {switchable.called(name, f): i for i, (name, _) in enumerate(names) for f in formats}
    own_ns = overhead_ns(clock)
    calls, samples = _calls(task), Samples()
    runs = [*((config, True) for config in design), *((config, False) for config in whole)]
    for round_, (config, is_timed) in task.rounds(runs, samples):
        read: list[Reading] = []
        watch: AbstractContextManager[list[Stamp]] = stamping(layers, clock) if is_timed else nullcontext([])
        with switchable.using(config), watch as stamps:
            task.run()  # the caches are as this configuration leaves them
            for _ in range(calls):
                stamps.clear()
                began = now()
                model(*args, **kwargs)
                read.append((began, now(), list(stamps)))
        if is_timed:
            one = sorted(read, key=lambda run: run[1] - run[0])[calls // 2]  # one that really was
            samples.forwards.append(_read(round_, config, names, one, own_ns))
        else:
            totals = [max(0.0, ended - began - own_ns) * 1e-3 for began, ended, _ in read]
            samples.totals[config].append((round_, statistics.median(totals)))
    return samples


def _read(round_: int, config: Config, names: Sequence[tuple[str, int]], reading: Reading, own_ns: float) -> Forward:
    """The stamps of a forward in microseconds. names: (layer, its group) by the number of a stamp."""
    began, ended, stamps = reading
    layers: dict[str, float] = {}
    after: dict[int, float] = {}
    gap: dict[int, float] = {}
    before, last = began, -1
    for number, start, stop in [*stamps, (-1, ended, ended)]:
        passed = max(0.0, start - before) * 1e-3
        if last >= 0:
            after[last] = after.get(last, 0.0) + passed
        if number >= 0:
            name, last = names[number]
            gap.setdefault(last, passed)
            layers[name] = layers.get(name, 0.0) + max(0.0, stop - start - own_ns) * 1e-3
            before = stop
    return Forward(round_, config, (ended - began) * 1e-3, layers, after, gap)


def _calls(task: Task) -> int:
    """Forwards in a sample."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        task.run()
        seconds.append(time.perf_counter() - began)
    return max(1, min(_MOST_CALLS, round(_SAMPLE_S / max(min(seconds), 1e-7))))
