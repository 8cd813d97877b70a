"""Time on a GPU: events, replayed graphs, and weights that rotate so that no call finds its own in the cache.

Three mistakes that this file exists to avoid: timing the launch instead of the kernel (a graph has no launch gaps),
timing the second-level cache instead of memory (weights rotate over more than it holds), and replaying a graph that
holds only some of the copies (a sample always holds whole turns of the rotation).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Candidate = Callable[[], object]

ROTATE_BYTES = 200 << 20  # of weights: more than three times the largest second-level cache of today's GPUs
MAX_COPIES = 1024


class Rotating:
    """A candidate that takes the next of several copies in each call.

    runs    one callable a copy.
    period  their number: a fair sample holds a multiple of it.
    """

    def __init__(self, runs: Sequence[Candidate]) -> None:
        self.period = len(runs)
        self._endless = itertools.cycle(runs)

    def __call__(self) -> object:
        return next(self._endless)()


def held_bytes(state: Any) -> int:
    """Bytes of the tensors in a tensor, module, sequence or mapping; 0 for anything else."""
    if hasattr(state, "__tensor_flatten__"):  # a wrapper subclass of other tensors: its own storage is a dummy
        names, _ = state.__tensor_flatten__()
        return sum(held_bytes(getattr(state, name)) for name in names)
    if isinstance(state, torch.Tensor):
        return state.untyped_storage().nbytes()
    if isinstance(state, torch.nn.Module):
        return sum(held_bytes(tensor) for tensor in [*state.parameters(), *state.buffers()])
    if isinstance(state, Mapping):
        return sum(held_bytes(item) for item in state.values())
    if isinstance(state, (list, tuple)):
        return sum(held_bytes(item) for item in state)
    return 0


def copies_beyond_cache(weight_bytes: int, rotate_bytes: int = ROTATE_BYTES) -> int:
    """How many copies of the weights exceed `rotate_bytes`, at least 1 and at most MAX_COPIES."""
    return max(1, min(MAX_COPIES, math.ceil(rotate_bytes / max(1, weight_bytes))))


def copies_of(state: Any, count: int) -> list[Any]:
    """The state itself and `count - 1` deep copies: the same numbers at other addresses."""
    with torch.no_grad():
        return [state, *(copy.deepcopy(state) for _ in range(count - 1))]


class GraphDevice(Protocol):
    """What the clocks ask of a device; tests give one of their own."""

    def warm(self, run: Candidate) -> None:
        """Run once outside of any capture, where lazy initialisation is allowed."""

    def capture(self, run: Candidate) -> Callable[[], None]:
        """Record what `run` launches. -> a callable that launches all of it again."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Device time of what `run` launches."""


@contextmanager
def on_device(device: torch.device | None) -> Iterator[None]:
    """Inside a CUDA device is the current one: streams, events and graphs are made there. Others change nothing."""
    if device is None or device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


class TorchCuda:
    """The current CUDA device through torch (on_device).

    one_pool  all graphs share their memory: thousands of them fit, and the results of one are lost when another runs.
    """

    def __init__(self, *, one_pool: bool = False) -> None:
        self._pool = torch.cuda.graph_pool_handle() if one_pool else None

    def warm(self, run: Candidate) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, run: Candidate) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def seconds(self, run: Callable[[], object]) -> float:
        make: Callable[..., torch.cuda.Event] = torch.cuda.Event
        start, stop = make(enable_timing=True), make(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


def _repeated(candidate: Candidate, calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            candidate()

    return run


class CudaEventClock:
    """GPU time between two events on the current stream; launch gaps count, as they do for a user in eager mode."""

    name = "cuda-events"

    def __init__(self, device: GraphDevice | None = None) -> None:
        self._device = device or TorchCuda()

    def seconds(self, candidate: Candidate, calls: int) -> float:
        return self._device.seconds(_repeated(candidate, calls))


class CudaGraphClock:
    """GPU time of a replayed CUDA graph that holds `calls` calls: no launch gaps, the kernels alone.

    A rotating candidate is captured with its rotation, because the graph records whatever the successive calls launch.
    Graphs are kept for each candidate and number of calls, as long as the clock lives.
    """

    name = "cuda-graph"

    def __init__(self, device: GraphDevice | None = None) -> None:
        self._device = device or TorchCuda()
        self._graphs: dict[tuple[int, int], tuple[Candidate, Callable[[], None]]] = {}

    def seconds(self, candidate: Candidate, calls: int) -> float:
        key = (id(candidate), calls)
        if key not in self._graphs:
            self._device.warm(candidate)
            replay = self._device.capture(_repeated(candidate, calls))
            self._graphs[key] = (candidate, replay)  # the candidate is kept: its id is the key
        return self._device.seconds(self._graphs[key][1])
