"""Timing of rival callables in one process: interleaved rounds, shuffled order, medians and paired ratios.

Why not timeit: two figures taken minutes apart on a shared machine say little about each other. Here every round times
each candidate once, in random order, and a ratio is the median of the ratios within a round, so that whatever else the
machine does hits numerator and denominator alike.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.measure import gpu_timing
from pyquant.report.records.environment import FAKED

Candidate = gpu_timing.Candidate
# Calls of a sample for each untimed one before it. One call is not enough: a layer whose weights a predecessor has
# pushed out of the near caches takes twice its time at first, and five calls to settle.
_CALLS_A_LEAD = 4
_LONGEST_LEAD = 5


class Clock(Protocol):
    """Seconds that `calls` calls of a candidate take."""

    name: str

    def seconds(self, candidate: Candidate, calls: int) -> float: ...


class CpuClock:
    """CPU time of the whole process: immune to preemption, meaningful with one thread."""

    name = "cpu"
    now = staticmethod(time.process_time)

    def seconds(self, candidate: Candidate, calls: int) -> float:
        start = self.now()
        for _ in range(calls):
            candidate()
        return self.now() - start


class WallClock(CpuClock):
    """Wall time: for several threads, on a quiet machine."""

    name = "wall"
    now = staticmethod(time.perf_counter)


class FakedClock:
    """Measures nothing: every call takes a microsecond. For dry runs, whose files load_record refuses."""

    name = FAKED

    def seconds(self, candidate: Candidate, calls: int) -> float:
        candidate()
        return calls * 1e-6


CLOCKS: Mapping[str, Callable[[], Clock]] = {
    "cpu": CpuClock,
    "wall": WallClock,
    "cuda-events": gpu_timing.CudaEventClock,
    "cuda-graph": gpu_timing.CudaGraphClock,
    FAKED: FakedClock,
}


def make_clock(name: str) -> Clock:
    """The clock called `name`; ArgumentError for an unknown one."""
    if name not in CLOCKS:
        raise ArgumentError("clock", name, ", ".join(CLOCKS))
    return CLOCKS[name]()


def default_clock(threads: int) -> str:
    """CPU time on one thread, which other programs do not disturb; wall time on several, whose CPU time adds up."""
    return "cpu" if threads == 1 else "wall"


class CacheFlush:
    """Streams through 512 MiB, more than the last cache holds, so that the next call finds its weights in memory."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(128 << 20, dtype=torch.float32, device="cpu")

    def __call__(self) -> None:
        self._buffer.add_(1.0)


@dataclass
class Timings:
    """Samples in seconds a call: samples[name][round]; every list has the same length and rounds correspond.

    calls  of each candidate in a sample.
    """

    clock: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def median_us(self, name: str) -> float:
        """Median microseconds a call."""
        return statistics.median(self.samples[name]) * 1e6

    def spread(self, name: str) -> float:
        """Interquartile range over the median: how far to trust the figure."""
        ordered = sorted(self.samples[name])
        if len(ordered) < 4:
            return (ordered[-1] - ordered[0]) / max(statistics.median(ordered), 1e-12)
        low, _, high = statistics.quantiles(ordered, n=4)
        return (high - low) / max(statistics.median(ordered), 1e-12)

    def ratio(self, base: str, name: str) -> float:
        """How many times faster `name` is than `base`: the median of the per-round ratios."""
        pairs = zip(self.samples[base], self.samples[name], strict=True)
        return statistics.median(b / max(c, 1e-12) for b, c in pairs)


def time_interleaved(
    candidates: Mapping[str, Candidate],
    *,
    clock: Clock | None = None,
    rounds: int = 15,
    min_sample_s: float = 0.002,
    warm_calls: int = 3,
    max_calls: int = 2000,
    budget_s: float | None = None,
    flush: Callable[[], None] | None = None,
    seed: int = 0,
    gradients: bool = False,
) -> Timings:
    """Time every candidate once a round, in shuffled order.

    candidates    name -> callable without arguments; run under torch.inference_mode(). One that rotates over copies
                  (gpu_timing.Rotating) is sampled in whole turns.
    min_sample_s  a sample repeats its callable until it lasts about this long (one call with `flush`).
    budget_s      no new round starts after this many wall seconds; five rounds are always done (or `rounds`).
    flush         called before each sample, outside the timed part: cold caches. Without it caches are hot: untimed
                  calls, a quarter of its own and at most five, lead a sample: none pays for what its predecessor
                  evicted.
    gradients     the candidates call backward(): no torch.inference_mode().
    ->            Timings with one sample a candidate and round, in seconds a call.
    Raises ArgumentError when there is no candidate or no round.

    Example:
        >>> timings = time_interleaved({"a": lambda: None, "b": lambda: None}, rounds=2, min_sample_s=1e-5)
        >>> len(timings.samples["a"])
        2
    """
    if not candidates:
        raise ArgumentError("candidates", "none", "at least one")
    arguments.whole("rounds", rounds, 1)
    clock = clock or CpuClock()
    order = list(candidates)
    shuffle = random.Random(seed).shuffle
    timings = Timings(clock.name, {name: [] for name in order})
    with contextlib.nullcontext() if gradients else torch.inference_mode():
        calls = {
            name: _calls_per_sample(clock, run, warm_calls, min_sample_s, 1 if flush else max_calls)
            for name, run in candidates.items()
        }
        timings.calls |= calls
        started = time.perf_counter()
        for done in range(rounds):
            shuffle(order)
            for name in order:
                if flush:
                    flush()
                else:
                    for _ in range(min(1 + (calls[name] - 1) // _CALLS_A_LEAD, _LONGEST_LEAD)):
                        candidates[name]()
                timings.samples[name].append(clock.seconds(candidates[name], calls[name]) / calls[name])
            if budget_s is not None and done >= 4 and time.perf_counter() - started > budget_s:
                break
    return timings


def _calls_per_sample(clock: Clock, run: Candidate, warm_calls: int, min_sample_s: float, max_calls: int) -> int:
    for _ in range(warm_calls):
        run()
    if max_calls <= 1:
        return 1
    turn = int(getattr(run, "period", 1))
    seconds = clock.seconds(run, turn)
    return turn * max(1, min(max_calls // turn, int(min_sample_s / max(seconds, 1e-7))))


@contextlib.contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Sets the number of torch's CPU threads and restores it afterwards; None: leaves it."""
    before = torch.get_num_threads()
    if count is not None:
        arguments.whole("threads", count, 1, 2**31 - 1)
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
