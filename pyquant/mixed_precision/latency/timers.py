"""Clocks inside of a model: when each layer's forward began and ended, while the model runs as it always does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import nn

from pyquant.errors import ArgumentError

Stamp = tuple[int, int, int]  # number of the layer, began, ended


@runtime_checkable
class StampClock(Protocol):
    """A clock that can be read at any place, in nanoseconds."""

    name: str

    def now_ns(self) -> int: ...


@dataclass
class Stamps:
    """A StampClock of the system."""

    name: str
    now_ns: Callable[[], int]


# CPU time of the whole process is immune to preemption, and meaningful with one thread; wall time is for several.
STAMPS: Final[Mapping[str, StampClock]] = {
    "cpu": Stamps("cpu", time.process_time_ns),
    "wall": Stamps("wall", time.perf_counter_ns),
}


@contextmanager
def stamping(layers: Mapping[nn.Module, int], clock: StampClock) -> Iterator[list[Stamp]]:
    """Reads a clock before and after every forward of some layers, for the length of the block.

    layers  modules to be timed, each with the number that its stamps carry.
    ->      the stamps in the order in which calls ended, to be cleared by the caller.
    A layer keeps its class and its place: only its `forward` is led round the clock.
    """
    before = {layer: layer.__dict__.get("forward") for layer in layers}
    stamps: list[Stamp] = []
    try:
        for layer, number in layers.items():
            layer.__dict__["forward"] = timed(layer.forward, number, clock.now_ns, stamps)
        yield stamps
    finally:
        for layer, own in before.items():
            layer.__dict__.pop("forward", None)
            if own is not None:
                layer.__dict__["forward"] = own


def timed(run: Callable[..., Any], number: int, now: Callable[[], int], stamps: list[Stamp]) -> Callable[..., Any]:
    """The function, leaving a stamp at each call."""
    leave = stamps.append

    def forward(*args: Any, **kwargs: Any) -> Any:
        began = now()
        result = run(*args, **kwargs)
        leave((number, began, now()))
        return result

    return forward


def overhead_ns(clock: StampClock) -> float:
    """What a stamp reads for a call that does nothing: it is part of every reading."""
    stamps: list[Stamp] = []
    nothing = timed(lambda x: x, 0, clock.now_ns, stamps)
    for _ in range(201):
        nothing(None)
    return statistics.median(ended - began for _, began, ended in stamps)


def make_stamps(name: str) -> StampClock:
    """The clock called `name`. Raises ArgumentError: too coarse, or CPU time of several threads."""
    resolution = time.get_clock_info("process_time" if name == "cpu" else "perf_counter").resolution
    if resolution > 1e-6:
        raise ArgumentError("clock", f"{name!r}, which counts in steps of {resolution:g} s here", "steps of 1 us")
    if name == "cpu" and torch.get_num_threads() > 1:
        raise ArgumentError("clock", f"'cpu' with {torch.get_num_threads()} threads", "'wall', or threads=1")
    return STAMPS[name]
