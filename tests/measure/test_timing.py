"""Rounds, ratios and refusals of the timing harness, with a clock that the test drives."""

from __future__ import annotations

import statistics

import pytest

from pyquant.errors import ArgumentError
from pyquant.measure.timing import CpuClock, Timings, make_clock, time_interleaved


class ScriptedClock:
    """Every candidate takes the seconds that its dictionary entry says, times a slowness shared by one whole round."""

    name = "scripted"

    def __init__(self, seconds: dict, slowness: list[float]) -> None:
        self.cost, self.slowness, self.asked = seconds, slowness, []

    def seconds(self, candidate, calls: int) -> float:
        candidate()
        self.asked.append((candidate, calls))
        timed = len(self.asked) - len(self.cost)  # the first question about each candidate sizes its samples
        round_number = max(0, timed - 1) // len(self.cost)
        return self.cost[candidate] * calls * self.slowness[min(round_number, len(self.slowness) - 1)]


def two(slowness: list[float], **options):
    def slow() -> None: ...
    def fast() -> None: ...

    clock = ScriptedClock({slow: 0.004, fast: 0.001}, slowness)
    return clock, time_interleaved({"slow": slow, "fast": fast}, clock=clock, rounds=len(slowness), **options)


def test_ratio_is_immune_to_slow_rounds() -> None:
    slowness = [1.0, 50.0, 1.0, 7.0, 1.0]
    _, timings = two(slowness)
    assert {len(samples) for samples in timings.samples.values()} == {5}
    assert timings.ratio("slow", "fast") == pytest.approx(4.0)
    assert timings.ratio("fast", "slow") == pytest.approx(0.25)
    assert timings.median_us("fast") == pytest.approx(statistics.median(slowness) * 1000)


def test_ratio_pairs_rounds_and_not_medians() -> None:
    timings = Timings("t", {"a": [1.0, 10.0, 100.0], "b": [1.0, 1.0, 50.0]})
    assert timings.ratio("a", "b") == pytest.approx(2.0)  # of 1, 10, 2; the ratio of the medians would be 10


def test_samples_repeat_short_calls_and_flush_forbids_it() -> None:
    clock, _ = two([1.0], min_sample_s=0.008)
    assert {calls for _, calls in clock.asked[2:]} == {2, 8}
    flushed = []
    clock, _ = two([1.0], min_sample_s=0.008, flush=lambda: flushed.append(1))
    assert {calls for _, calls in clock.asked} == {1}
    assert len(flushed) == 2


def test_hot_samples_are_led_by_untimed_calls() -> None:
    def run(sample_s: float, flush=None) -> int:
        called = []

        def candidate() -> None:
            called.append(1)

        clock = ScriptedClock({candidate: 0.001}, [1.0])
        time_interleaved({"a": candidate}, clock=clock, rounds=1, warm_calls=0, flush=flush, min_sample_s=sample_s)
        return len(called)  # the scripted clock itself calls the candidate once for each question

    assert run(0.002) == 1 + 1 + 1  # sized, led, timed
    assert run(0.008) == 1 + 2 + 1  # eight calls a sample, a quarter of them before it
    assert run(0.100) == 1 + 5 + 1  # five are enough, and a quarter of thousands would be a quarter of the time
    assert run(0.002, flush=lambda: None) == 1  # cold: one question, nothing leads


def test_order_differs_between_rounds() -> None:
    clock, _ = two([1.0] * 12)
    timed = [candidate for candidate, _ in clock.asked[2:]]
    firsts = {timed[i] for i in range(0, len(timed), 2)}
    assert len(firsts) == 2


def test_budget_ends_rounds_but_not_before_five() -> None:
    _, timings = two([1.0] * 30, budget_s=0.0)
    assert {len(samples) for samples in timings.samples.values()} == {5}


def test_spread_tells_noise() -> None:
    assert Timings("t", {"a": [1.0] * 8}).spread("a") == 0
    assert Timings("t", {"a": [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]}).spread("a") > 0.3
    assert Timings("t", {"a": [1.0, 3.0]}).spread("a") == pytest.approx(1.0)


@pytest.mark.parametrize(("candidates", "rounds"), [({}, 3), ({"a": lambda: None}, 0)])
def test_nothing_to_time_is_refused(candidates, rounds) -> None:
    with pytest.raises(ArgumentError, match=r"candidates|rounds"):
        time_interleaved(candidates, rounds=rounds)


def test_clocks_by_name() -> None:
    assert make_clock("cpu").name == "cpu"
    with pytest.raises(ArgumentError, match="sundial"):
        make_clock("sundial")


def test_cpu_clock_counts_work() -> None:
    called = []
    assert CpuClock().seconds(lambda: called.append(1), 3) >= 0
    assert len(called) == 3
