"""What a plan says of latencies that were timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pyquant.mixed_precision.decide import _times


def findings(**times: tuple[float, float, float]) -> Any:
    return SimpleNamespace(times=times)


def test_intervals_stand_beside_the_medians() -> None:
    assert _times(findings(a=(100.0, 95.0, 110.0)), "a") == "100.0 us, 95.0 to 110.0"


def test_rounds_that_scatter_are_named() -> None:
    """131.8 us of 7999, on a machine where something else ran."""
    said = _times(findings(a=(131.8, 130.0, 135.0), b=(7999.0, 300.0, 9000.0)), "a", "b")
    assert said.startswith("131.8 us, 130.0 to 135.0 of 7999.0 us, 300.0 to 9000.0: the rounds scatter")
