"""The founding experiment: the latency of every configuration, kernels alone and end to end, in interleaved
rounds, and the trade-offs that they are."""

from __future__ import annotations

import contextlib
import hashlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from pyquant.bench.mlp_check import check_net
from pyquant.bench.mlp_net import (
    BATCH,
    BITS,
    FLOAT,
    SIZES,
    Config,
    Joint,
    MlpNet,
    all_configs,
    all_joints,
    capacity,
    joints,
)
from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.io.journal import Journal
from pyquant.measure.environment import library_digest
from pyquant.measure.timing import Clock
from pyquant.report.records.environment import Environment
from pyquant.report.records.trade_off import TradeOff, TradeOffAxis, TradeOffPoint, trade_off

KERNEL, END_TO_END = "kernel", "end to end"
COLUMNS: Final = (KERNEL, END_TO_END)
ADDITIVE_SAMPLE: Final = 40
HEADLINE_RUNS = 7
_WHAT = {
    KERNEL: "the products alone, inputs ready in each layer's format",
    END_TO_END: "floats in, floats out, quantising and converting included",
}
Candidate = tuple[str, Config | Joint]
Pair = tuple[Callable[[], object], Callable[[], object]]


@dataclass(frozen=True)
class MlpBench:
    """What is measured.

    sizes, batch   of the activations; the defaults are the original experiment's.
    configs        which configurations.
    runs           rounds; each times every configuration once in either column. Others: as in MlpNet.
    """

    sizes: tuple[int, ...] = SIZES
    batch: int = BATCH
    configs: tuple[Config, ...] = tuple(all_configs())
    runs: int = 30
    device: str = "cpu"
    float_type: torch.dtype = torch.bfloat16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("runs", self.runs), ("configs", len(self.configs))):
            arguments.whole(name, value, 1)
        for config in self.configs:
            if len(config) != len(self.sizes) - 1:
                raise ArgumentError("configs", ",".join(config), f"{len(self.sizes) - 1} formats, one a layer")

    @property
    def steps(self) -> int:
        """How often a run says what comes next."""
        return 2 + self.runs


class TimeSummary(NamedTuple):
    """The runs of one candidate in microseconds; low, high: 10th and 90th percentile."""

    median: float
    mean: float
    std: float
    low: float
    high: float

    @staticmethod
    def of(seconds: Sequence[float]) -> TimeSummary:
        """The summary of some seconds.

        Example:
            >>> TimeSummary.of([1e-6, 2e-6, 3e-6]).median
            2.0
        """
        us = [value * 1e6 for value in seconds]
        if len(us) == 1:
            return TimeSummary(us[0], us[0], 0.0, us[0], us[0])
        tenths = statistics.quantiles(us, n=10, method="inclusive")
        return TimeSummary(statistics.median(us), statistics.fmean(us), statistics.stdev(us), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Additivity:
    """How well the sum of single layers predicts whole configurations: relative errors of `configs` random ones.

    bias  median of predicted / measured - 1.
    """

    configs: int
    median: float
    worst: float
    bias: float


@dataclass(frozen=True)
class MlpResult:
    """times[column][configuration]; additivity[column]; checked: layer results that were compared before."""

    bench: MlpBench
    clock: str
    times: Mapping[str, Mapping[Config, TimeSummary]]
    additivity: Mapping[str, Additivity]
    checked: int


def run_mlp_bench(
    bench: MlpBench,
    clock: Clock,
    *,
    environment: Environment,
    journal: Path | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> MlpResult:
    """Build, check, time.

    journal   file of finished rounds; a run of the same setting goes on behind them.
    on_step   called with what comes next, bench.steps times.
    Raises PyquantError where a layer's result is wrong; CheckpointError where the journal is of another setting.
    """
    candidates = _candidates(bench)
    facts = {name: str(fact) for name, fact in key_of(bench, clock.name, environment, len(candidates)).items()}
    finished = None if journal is None else Journal(journal, "rounds of the founding experiment", facts)
    with finished or contextlib.nullcontext(), torch.inference_mode():
        rounds: list[list[float]] = list(finished.entries.values()) if finished else []
        on_step("every layer in every format")
        net = MlpNet(bench.sizes, bench.batch, bench.device, bench.float_type, bench.seed)
        on_step(f"the results of {len(bench.configs)} configurations against the exact ones")
        checked = check_net(net, bench.configs)
        runs = [_callables(net, bench.configs, *candidate) for candidate in candidates]
        for done in range(bench.runs):
            on_step(f"round {done + 1} of {bench.runs}")
            if done >= len(rounds):
                rounds.append([_rounded(seconds) for seconds in _round(runs, clock, bench.seed + done)])
                if finished:
                    finished.add(str(done), rounds[-1])
    return _result(bench, clock.name, candidates, rounds[: bench.runs], checked)


def key_of(bench: MlpBench, clock: str, environment: Environment, candidates: int) -> dict[str, Any]:
    """What rounds must share to be one measurement. The number of runs is not part of it: more may be added."""
    return {
        "sizes": list(bench.sizes),
        "batch": bench.batch,
        "seed": bench.seed,
        "float": str(bench.float_type),
        "clock": clock,
        "device": environment.gpu or environment.cpu,
        "driver": environment.driver,
        "threads": environment.threads,
        "torch": environment.torch,
        "libraries": library_digest(),
        "candidates": candidates,
        "configs": hashlib.sha256(repr(bench.configs).encode()).hexdigest()[:16],
    }


def _candidates(bench: MlpBench) -> list[Candidate]:
    """Everything that a round times: configurations in both columns, and the single layers that they are made of."""
    candidates: list[Candidate] = [(column, config) for column in COLUMNS for config in bench.configs]
    used = {joint for config in bench.configs for joint in joints(config)}
    kernels = {(joint.layer, joint.own, joint.after) for joint in used}
    layers = len(bench.sizes) - 1
    ready = [j for j in all_joints(layers, from_float=False) if (j.layer, j.own, j.after) in kernels]
    candidates += [(KERNEL, joint) for joint in ready]
    return candidates + [(END_TO_END, joint) for joint in all_joints(layers, from_float=True) if joint in used]


def _callables(net: MlpNet, configs: Sequence[Config], column: str, what: Config | Joint) -> Pair:
    """What leads a sample, untimed, and what is timed. A single layer is led by a whole network that it is part of:
    then the caches hold of it what they hold when its turn comes there."""
    whole = net.kernels if column == KERNEL else net.forward
    if not isinstance(what, Joint):
        return whole(what), whole(what)
    home = next(c for c in configs if what in joints(c) or (column == KERNEL and what in map(_ready, joints(c))))
    return whole(home), net.product(what) if column == KERNEL else net.one(what)


def _round(runs: Sequence[Pair], clock: Clock, seed: int) -> list[float]:
    """One sample of each, in random order: what the machine does meanwhile hits all alike."""
    order = list(range(len(runs)))
    random.Random(seed).shuffle(order)
    seconds = [0.0] * len(runs)
    for i in order:
        lead, run = runs[i]
        if clock.name in ("cpu", "wall"):
            lead()  # so that no candidate is charged for another's cache evictions
        seconds[i] = clock.seconds(run, 1)
    return seconds


def _result(
    bench: MlpBench, clock: str, candidates: Sequence[Candidate], rounds: Sequence[Sequence[float]], checked: int
) -> MlpResult:
    samples = {candidate: TimeSummary.of([one[i] for one in rounds]) for i, candidate in enumerate(candidates)}
    times = {column: {config: samples[column, config] for config in bench.configs} for column in COLUMNS}
    additivity = {
        column: additivity_of(
            {config: s.median for config, s in times[column].items()},
            {what: s.median for (of, what), s in samples.items() if of == column and isinstance(what, Joint)},
            seed=bench.seed,
        )
        for column in COLUMNS
    }
    return MlpResult(bench, clock, times, additivity, checked)


def additivity_of(
    measured: Mapping[Config, float], single: Mapping[Joint, float], *, count: int = ADDITIVE_SAMPLE, seed: int = 0
) -> Additivity:
    """Measured latency of random configurations against the sum of their layers, each timed between its neighbours.

    measured, single  latencies in one unit. Layers that were timed on ready inputs count for both kinds of neighbour.
    """
    chosen = random.Random(seed).sample(sorted(measured), min(count, len(measured)))
    errors = []
    for config in chosen:
        parts = [single[joint] if joint in single else single[_ready(joint)] for joint in joints(config)]
        errors.append(sum(parts) / measured[config] - 1)
    sizes = [abs(error) for error in errors]
    return Additivity(len(chosen), statistics.median(sizes), max(sizes), statistics.median(errors))


def _ready(joint: Joint) -> Joint:
    """The joint whose input is already in its own format."""
    return Joint(joint.layer, joint.own, joint.after, joint.own == FLOAT)


def trade_off_of(result: MlpResult, column: str, environment: Environment, of: str = "output") -> TradeOff:
    """One column of a result against representational capacity.

    column  KERNEL or END_TO_END: the two are never in one picture.
    of      'output' or 'input' dimensions: what capacity counts.
    """
    bench, times = result.bench, result.times[column]
    shown = {FLOAT: "bf16" if bench.float_type == torch.bfloat16 else "fp16"}
    points = [
        TradeOffPoint(
            {f"layer {i + 1}": shown.get(name, name) for i, name in enumerate(config)},
            _rounded(s.median),
            float(capacity(bench.sizes, config, of)),
            _rounded(s.low),
            _rounded(s.high),
            figures={"mean_us": _rounded(s.mean), "std_us": _rounded(s.std)},
        )
        for config, s in times.items()
    ]
    record = trade_off(
        points,
        f"{'-'.join(map(str, bench.sizes))}, batch {bench.batch}: {len(points)} configurations, {column} latency",
        TradeOffAxis("latency", "us", f"{_WHAT[column]}; median of {bench.runs} runs"),
        TradeOffAxis("representational capacity", "bits", f"sum over layers of {of} dimension x bits of its format"),
        higher_is_better=True,
        formats=tuple(shown.get(name, name) for name in BITS),
    )
    if bench.runs < HEADLINE_RUNS:  # the largest of hundreds of differences is then one of noise
        record = replace(record, pair=None)
    return replace(
        record,
        environment=environment.plain(),
        command=environment.command,
        notes=tuple(_notes(result, column)),
    )


def _notes(result: MlpResult, column: str) -> list[str]:
    added = result.additivity[column]
    errors = f"median error {added.median:.1%}, worst {added.worst:.1%}, bias {added.bias:+.1%}"
    against = f"{added.configs} random configurations"
    how = "integer ones bit by bit, and every timed network against its checked layers"
    few = f"{result.bench.runs} runs: too few for a headline, which takes medians of {HEADLINE_RUNS} or more."
    return [
        *([few] if result.bench.runs < HEADLINE_RUNS else []),
        f"Column {column}: {_WHAT[column]}. The other column has a record of its own.",
        f"Checked before timing: {result.checked} layer results in place against exact references, {how}.",
        "Every round times every configuration once, in random order.",
        f"Additivity: single layers, each timed between its neighbours' formats, summed, against {against}: {errors}.",
    ]


def _rounded(value: float) -> float:
    """Five digits: more would be noise in every file."""
    return float(f"{value:.5g}")
