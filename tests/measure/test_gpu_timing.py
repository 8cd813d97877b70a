"""Graph replay and rotation, on a device that only counts."""

from __future__ import annotations

import pytest
import torch

from pyquant.measure.gpu_timing import (
    MAX_COPIES,
    ROTATE_BYTES,
    CudaEventClock,
    CudaGraphClock,
    Rotating,
    copies_beyond_cache,
    copies_of,
    held_bytes,
)
from pyquant.measure.timing import time_interleaved


class CountingDevice:
    """A call costs what it says; a replay costs what was recorded and launches nothing again."""

    def __init__(self) -> None:
        self.now = 0.0
        self.captured: list[float] = []
        self.launched: list[str] = []

    def launch(self, name: str, seconds: float) -> None:
        self.launched.append(name)
        self.now += seconds

    def warm(self, run) -> None:
        run()

    def capture(self, run):
        start = self.now
        run()
        cost = self.now - start
        self.captured.append(cost)

        def replay() -> None:
            self.now += cost

        return replay

    def seconds(self, run) -> float:
        start = self.now
        run()
        return self.now - start


def kernels(device: CountingDevice, name: str, seconds: float, copies: int) -> Rotating:
    return Rotating([lambda i=i: device.launch(f"{name}{i}", seconds) for i in range(copies)])


def test_a_sample_holds_whole_turns_of_the_rotation() -> None:
    device = CountingDevice()
    a, b = kernels(device, "a", 0.001, 7), kernels(device, "b", 0.0001, 3)
    timings = time_interleaved({"a": a, "b": b}, clock=CudaGraphClock(device), rounds=5, min_sample_s=0.02)
    assert timings.clock == "cuda-graph"
    # per call: what a kernel costs, whatever the number of copies and calls
    assert timings.median_us("a") == pytest.approx(1000.0)
    assert timings.median_us("b") == pytest.approx(100.0)
    assert timings.ratio("a", "b") == pytest.approx(10.0)
    # one turn to size the samples, then as many whole turns as fit: 7 and 14 calls of a, 3 and 198 of b
    assert device.captured == pytest.approx([0.007, 0.0003, 0.014, 0.0198]) or device.captured == pytest.approx(
        [0.007, 0.0003, 0.0198, 0.014]  # the order of a round is shuffled
    )


def test_graphs_are_captured_once_and_replayed() -> None:
    device = CountingDevice()
    clock, run = CudaGraphClock(device), kernels(device, "k", 0.25, 1)
    for _ in range(5):
        assert clock.seconds(run, 4) == 1.0
    assert device.captured == [1.0]
    assert device.launched == ["k0"] * 5  # one to warm up, four captured
    assert clock.seconds(run, 2) == 0.5
    assert len(device.captured) == 2


def test_a_sample_of_too_few_calls_would_not_rotate() -> None:
    """The mistake that `period` prevents, made on purpose: one call a graph times one copy only."""
    device = CountingDevice()
    copies = [0.001] + [0.003] * 9  # the first copy stays in the cache
    fair = Rotating([lambda i=i: device.launch(str(i), copies[i]) for i in range(10)])
    wrong = Rotating([lambda i=i: device.launch(str(i), copies[i]) for i in range(10)])
    del wrong.period
    told = time_interleaved(
        {"fair": fair, "wrong": wrong}, clock=CudaGraphClock(device), rounds=5, warm_calls=0, min_sample_s=0.0
    )
    assert told.median_us("fair") == pytest.approx(2800.0)
    assert told.median_us("wrong") != pytest.approx(2800.0)


def test_events_count_every_call() -> None:
    device = CountingDevice()
    assert CudaEventClock(device).seconds(kernels(device, "k", 0.5, 2), 3) == 1.5
    assert device.launched == ["k0", "k1", "k0"]


def test_a_capture_that_fails_is_an_error_and_leaves_no_graph() -> None:
    device = CountingDevice()
    device.capture = lambda run: (_ for _ in ()).throw(RuntimeError("operation not permitted when stream is capturing"))
    clock = CudaGraphClock(device)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="capturing"):
            clock.seconds(kernels(device, "k", 0.1, 1), 1)


def test_copies_exceed_the_cache() -> None:
    for nbytes in (1 << 20, 3 << 20, 50 << 20, 199 << 20, 1 << 30):
        copies = copies_beyond_cache(nbytes)
        assert copies * nbytes >= ROTATE_BYTES
        assert (copies - 1) * nbytes < ROTATE_BYTES
    assert ROTATE_BYTES > 180e6
    assert copies_beyond_cache(0) == copies_beyond_cache(1) == MAX_COPIES


def test_copies_are_equal_and_apart() -> None:
    layer = torch.nn.Linear(4, 3)
    state = [torch.arange(6), {"layer": layer}, "a name"]
    assert held_bytes(state) == 6 * 8 + (12 + 3) * 4
    first, second, third = copies_of(state, 3)
    assert first is state
    assert torch.equal(second[0], third[0])
    addresses = {s[0].data_ptr() for s in (first, second, third)} | {
        s[1]["layer"].weight.data_ptr() for s in (first, second, third)
    }
    assert len(addresses) == 6

    class Wrapper:
        """A tensor subclass made of two tensors, as quantisation packages make them."""

        codes, scale = torch.zeros(10, dtype=torch.int8), torch.zeros(2)

        def __tensor_flatten__(self):
            return ["codes", "scale"], {}

    assert held_bytes([Wrapper()]) == 10 + 8
    view = torch.zeros(8, 4).t()
    assert held_bytes(view) == held_bytes(copies_of(view, 2)[1]) == 128
    assert copies_of(view, 2)[1].stride() == view.stride()
