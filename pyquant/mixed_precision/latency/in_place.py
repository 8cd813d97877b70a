"""Layers timed where they are, inside of forwards of the whole model: for a CPU, whose clock can be read anywhere."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.latency.samples import Config, Effort, Forward, ProgressCall, Samples
from pyquant.mixed_precision.latency.timers import LayerTimers, Stamp, StampClock, overhead_ns

_SAMPLE_S: Final = 0.002  # a sample repeats short models until it lasts about this long
_MOST_CALLS: Final = 25


def samples_in_place(
    switchable: SwitchableModel,
    design: Sequence[Config],
    whole: Sequence[Config],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    clock: StampClock,
    effort: Effort,
    seed: int,
    tell: ProgressCall,
) -> tuple[Samples, int]:
    """Readings of `design` with timers inside and of `whole` without. -> samples, rounds done."""
    names = [(name, g) for g, group in enumerate(switchable.groups) for name in group.layers]
    count = len(switchable.formats)
    layers = {switchable.layer(name, f): i for i, (name, _) in enumerate(names) for f in range(count)}
    timers, own_ns = LayerTimers(layers, clock), overhead_ns(clock)
    tasks = [*((c, True) for c in design), *((c, False) for c in whole)]
    calls = _calls(switchable, args, kwargs)
    samples, rng, started = Samples(), random.Random(seed), time.perf_counter()
    model, now = switchable.model, clock.now_ns

    def forward() -> tuple[int, int]:
        began = now()
        model(*args, **kwargs)
        return began, now()

    done = 0
    while not effort.is_enough(done, started, samples):
        rng.shuffle(tasks)
        for config, is_timed in tasks:
            with switchable.using(config):
                model(*args, **kwargs)  # the caches are as this configuration leaves them
                if not is_timed:
                    runs = [forward() for _ in range(calls)]
                    totals = [max(0.0, ended - began - own_ns) * 1e-3 for began, ended in runs]
                    samples.totals[config].append((done, statistics.median(totals)))
                    continue
                runs_read = []
                with timers.running() as stamps:
                    for _ in range(calls):
                        stamps.clear()
                        began, ended = forward()
                        runs_read.append((ended - began, began, ended, list(stamps)))
            _, began, ended, read = sorted(runs_read, key=lambda f: f[0])[calls // 2]  # one that really was
            samples.forwards.append(_read(done, config, names, began, ended, read, own_ns))
        done += 1
        tell(done, effort.rounds, "rounds")
    return samples, done


def _read(
    round_: int,
    config: Config,
    names: Sequence[tuple[str, int]],
    began: int,
    ended: int,
    stamps: Sequence[Stamp],
    own_ns: float,
) -> Forward:
    """The stamps of a forward in microseconds. names: (layer, its group) by the number of a stamp."""
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


def _calls(switchable: SwitchableModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Forwards in a sample."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        switchable.model(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
    return max(1, min(_MOST_CALLS, round(_SAMPLE_S / max(min(seconds), 1e-7))))
