"""Our layers at 1, 2, 4 ... threads against the same code on one thread: wall time, in one process.

Changing torch's thread count between two calls costs the next one its warm pool, so a round takes every thread count in
turn and times several calls of each, led by untimed ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyquant.bench.problem import inputs_of
from pyquant.core.presets import scheme_from_name
from pyquant.measure.environment import describe_environment
from pyquant.nn.qlinear import QLinear
from pyquant.report.records.bench import Bar
from pyquant.report.records.environment import Environment

MANY_ROWS, SHARE_OF_CORES = 64, 0.85
NEVER_SLOWER = 0.97  # the same code twice, timed by the wall, differs by so much
_SAMPLE_S = 0.004


@dataclass(frozen=True)
class ScalingRow:
    """One layer: microseconds a call on each number of threads, and how many times one thread's speed that is."""

    m: int
    k: int
    n: int
    scheme: str
    median_us: dict[int, float]
    speedup: dict[int, float]


@dataclass(frozen=True)
class ScalingReport:
    """Every layer at every thread count of one run."""

    environment: Environment
    rows: list[ScalingRow]
    bars: list[Bar] = field(default_factory=list)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 ... and `most` itself."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return counts if most == 1 else [*counts, most]


def measure(
    shapes: Sequence[tuple[int, int, int]],
    schemes: Sequence[str],
    rounds: int,
    budget_s: float,
    on_step: Callable[[str], None],
) -> ScalingReport:
    """Times every layer; the largest thread count is torch's own now, and is what torch is left with."""
    most = torch.get_num_threads()
    counts, rows = thread_counts(most), []
    try:
        for m, k, n in shapes:
            for scheme in schemes:
                on_step(f"M={m} K={k} N={n} {scheme}")
                layer, x = inputs_of(m, k, n).qlinear(scheme_from_name(scheme), torch.float32)
                rows.append(_row((m, k, n), scheme, _samples(layer, x, counts, rounds, budget_s)))
    finally:
        torch.set_num_threads(most)
    return ScalingReport(describe_environment(clock="wall"), rows, bars_of(rows))


def _samples(layer: QLinear, x: Tensor, counts: Sequence[int], rounds: int, budget_s: float) -> dict[int, list[float]]:
    samples: dict[int, list[float]] = {count: [] for count in counts}
    started = time.perf_counter()
    with torch.inference_mode():
        for done in range(rounds):
            for count in counts:
                torch.set_num_threads(count)
                samples[count].append(_seconds(layer, x))
            if done >= 4 and time.perf_counter() - started > budget_s:
                break
    return samples


def _seconds(layer: QLinear, x: Tensor) -> float:
    """Seconds a call, over about _SAMPLE_S of them; three untimed calls first, which also wake the pool."""
    for _ in range(2):
        layer(x)
    start = time.perf_counter()
    layer(x)
    calls = max(1, int(_SAMPLE_S / max(time.perf_counter() - start, 1e-7)))
    start = time.perf_counter()
    for _ in range(calls):
        layer(x)
    return (time.perf_counter() - start) / calls


def _row(shape: tuple[int, int, int], scheme: str, samples: dict[int, list[float]]) -> ScalingRow:
    speedup = {
        count: statistics.median(one / many for one, many in zip(samples[1], taken, strict=True))
        for count, taken in samples.items()
    }
    return ScalingRow(*shape, scheme, {c: statistics.median(s) * 1e6 for c, s in samples.items()}, speedup)


def bars_of(rows: Sequence[ScalingRow]) -> list[Bar]:
    """Many rows: the smallest share of the threads; all rows: never slower with more of them."""
    bars = []
    shares = [gain / c for row in rows if row.m >= MANY_ROWS for c, gain in row.speedup.items() if c > 1]
    if shares:
        bars.append(Bar(f"M >= {MANY_ROWS}, speedup over threads, smallest", SHARE_OF_CORES, min(shares), unit=""))
    gains = [gain for row in rows for c, gain in row.speedup.items() if c > 1]
    if gains:
        bars.append(Bar("more threads against one, smallest of all rows", NEVER_SLOWER, min(gains)))
    return bars


def markdown(report: ScalingReport) -> str:
    """The table, with the machine and the bars."""
    counts = list(report.rows[0].median_us) if report.rows else []
    head = ["K x N", "M", "scheme", *(f"{c} threads" if c > 1 else "1 thread, us" for c in counts)]
    lines = ["# Threads", "", report.environment.line(), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in report.rows:
        cells = [f"{row.k}x{row.n}", str(row.m), row.scheme, f"{row.median_us[1]:.1f}"]
        cells += [f"{row.median_us[c]:.1f} ({row.speedup[c]:.2f}x)" for c in counts[1:]]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Wall time; in brackets the speed against the same code on one thread, median of the ratios of a round.",
        "",
    ]
    for bar in report.bars:
        verdict = "PASS" if bar.passed else "MISS"
        lines.append(f"- {verdict}: {bar.name}: {bar.measured:.2f} (goal {bar.direction} {bar.goal:g})")
    if not report.bars:
        lines.append("- one thread only: nothing to compare")
    lines += ["", f"Command: `{report.environment.command}`", ""]
    return "\n".join(lines)
