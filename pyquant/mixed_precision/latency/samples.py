"""Readings of a model's latency: which configurations to run, what was read in each, and when that is enough."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel

Mask = Sequence[Sequence[bool]]
ProgressCall = Callable[[int, int, str], None]
_MOST_DRAWS = 1000  # random configurations in a row that were known already: there are no more


@dataclass(frozen=True)
class Forward:
    """One forward of the model with timers inside: its round, its configuration, and microseconds.

    layers  {layer: of all its calls}; after: {group: what passed after calls of its layers, each until the next layer};
    gap     {group: what passed before its first layer, since the layer before}.
    """

    round: int
    config: Config
    total: float
    layers: dict[str, float]
    after: dict[int, float]
    gap: dict[int, float]

    def over(self, speed: float) -> Forward:
        """As if the round had run at another speed."""
        layers = {name: us / speed for name, us in self.layers.items()}
        after, gap = ({g: us / speed for g, us in part.items()} for part in (self.after, self.gap))
        return replace(self, total=self.total / speed, layers=layers, after=after, gap=gap)


@dataclass
class Samples:
    """Everything that was read.

    totals    {configuration: [(round, us)]} of the whole model, without timers inside.
    forwards  with timers inside; or, from layers that were timed alone, isolated: {(layer, format): [us]}.
    rounds    of the whole model, how many.
    """

    totals: dict[Config, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    forwards: list[Forward] = field(default_factory=list)
    isolated: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: int = 0

    def steadied(self) -> Samples:
        """The same as if every round had run at the speed of the median round: slow rounds are divided out.

        The speed of a round is the median over its runs of time / median time of that configuration.
        """
        rows = [(("whole", config), round_, us) for config, times_of in self.totals.items() for round_, us in times_of]
        rows += [(("timed", f.config), f.round, f.total) for f in self.forwards]
        times: dict[object, list[float]] = defaultdict(list)
        for key, _, us in rows:
            times[key].append(us)
        middle = {key: statistics.median(values) for key, values in times.items()}
        ratios: dict[int, list[float]] = defaultdict(list)
        for key, round_, us in rows:
            ratios[round_].append(us / middle[key] if us > 0 and middle[key] > 0 else 1.0)
        speed = {round_: statistics.median(values) for round_, values in ratios.items()}
        totals = {config: [(n, us / speed[n]) for n, us in times_of] for config, times_of in self.totals.items()}
        return Samples(totals, [f.over(speed[f.round]) for f in self.forwards], dict(self.isolated))


@dataclass(frozen=True)
class Effort:
    """When to stop measuring. rounds: most; min_rounds: least, whatever the time; max_seconds: no new round after that;
    tolerance: enough when every interval's half is within this share."""

    rounds: int = 40
    min_rounds: int = 8
    max_seconds: float = 60.0
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        for name in ("rounds", "min_rounds"):
            arguments.whole(name, getattr(self, name), 1)
        if self.min_rounds > self.rounds:
            raise ArgumentError("min_rounds", self.min_rounds, f"at most rounds, {self.rounds}")
        for name in ("max_seconds", "tolerance"):
            arguments.number(name, getattr(self, name), 0, above=True, infinite=True)

    def is_enough(self, started: float, samples: Samples) -> bool:
        """Of samples that were begun at `started` of time.perf_counter."""
        if samples.rounds < self.min_rounds:
            return False
        late = time.perf_counter() - started > self.max_seconds
        return samples.rounds >= self.rounds or late or is_stable(samples, self.tolerance)


def silent(done: int, total: int, what: str) -> None:
    """The ProgressCall of nobody."""


@dataclass(frozen=True)
class Task:
    """What is timed: the model, the arguments of its call, how long, in which random order, and whom to tell of it."""

    switchable: SwitchableModel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    effort: Effort
    seed: int
    tell: ProgressCall

    def run(self) -> None:
        """The model as it is now, once."""
        self.switchable.model(*self.args, **self.kwargs)

    def rounds(self, runs: list[Any], samples: Samples, what: str = "rounds") -> Iterator[tuple[int, Any]]:
        """(round, run) of all runs in random order, round after round until the samples are enough."""
        rng, started = random.Random(self.seed), time.perf_counter()
        while not self.effort.is_enough(started, samples):
            rng.shuffle(runs)
            for run in runs:
                yield samples.rounds, run
            samples.rounds += 1
            self.tell(samples.rounds, self.effort.rounds, what)


def is_stable(samples: Samples, tolerance: float) -> bool:
    """Every configuration's interval is narrow, and every layer's; of small layers, against the mean one."""
    samples = samples.steadied()
    times: dict[tuple[str, Config], list[float]] = defaultdict(list)
    for forward in samples.forwards:
        for name, us in forward.layers.items():
            times[name, forward.config].append(us)
    totals = [median_interval([us for _, us in rows]) for rows in samples.totals.values()]
    if any((high - low) / 2 > tolerance * middle for middle, low, high in totals):
        return False
    cells = [median_interval(values) for values in times.values()]
    mean = statistics.fmean(middle for middle, _, _ in cells) if cells else 0.0
    # A layer is seen in several configurations of the design; their mean is known better than each.
    return all((high - low) / 2 <= 2 * tolerance * max(middle, mean) for middle, low, high in cells)


def design(allowed: Mask) -> list[Config]:
    """Configurations in which every group has every format, next to every format of its neighbour, equally often.

    Format of group g in configuration (i, j): (i + j * g) mod formats; j = 0 are the uniform ones. Refused formats
    become the first one.
    """
    count = len(allowed[0])
    configs = [
        tuple((i + j * g) % count if row[(i + j * g) % count] else 0 for g, row in enumerate(allowed))
        for i in range(count)
        for j in range(count)
    ]
    return list(dict.fromkeys(configs))


def held_out(allowed: Mask, known: Sequence[Config], count: int, seed: int) -> list[Config]:
    """Random configurations, none of them known; as many as there are, at most `count`."""
    rng, taken = random.Random(seed), {*known}
    drawn: list[Config] = []
    draws = 0
    while len(drawn) < count and draws < _MOST_DRAWS:
        config = tuple(rng.choice([f for f, good in enumerate(row) if good]) for row in allowed)
        draws += 1
        if config not in taken:
            taken.add(config)
            drawn.append(config)
            draws = 0
    return drawn


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the 95 % interval of the median by order statistics, whatever the distribution."""
    ordered = sorted(values)
    out = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return statistics.median(ordered), ordered[out], ordered[-1 - out]
