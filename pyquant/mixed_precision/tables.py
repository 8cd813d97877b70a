"""What a search measures of single groups and of candidates: first losses, the latency table, times end to end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pyquant.core.registry import SCORERS
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.latency.measure import (
    latency_fingerprint,
    load_latency,
    measure_configurations,
    measure_latency,
)
from pyquant.mixed_precision.latency.samples import Effort
from pyquant.mixed_precision.ledger import Ledger
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs, TaskMetric
from pyquant.mixed_precision.loss.scorers import Scorer, Scoring
from pyquant.mixed_precision.options import SearchOptions
from pyquant.report.records.latency import LatencyTable
from pyquant.report.records.record import from_plain, to_plain

Interval = tuple[float, float, float]  # median, low, high


def latency_table(ledger: Ledger, switchable: SwitchableModel, example: Any, options: SearchOptions) -> LatencyTable:
    """The table that was given, once its fingerprint is this machine's, or one that is measured now."""
    if isinstance(options.latency, LatencyTable):
        options.latency.require(latency_fingerprint(switchable, example))
        return options.latency
    if options.latency is not None:
        return load_latency(os.fspath(options.latency), switchable, example)

    effort: dict[str, Any] = {"max_seconds": options.latency_seconds, "clock": options.clock, "seed": options.seed}
    table: LatencyTable = from_plain(
        ledger.plain("latency table", "", lambda: to_plain(measure_latency(switchable, example, **effort)))
    )
    return table


def timed(
    ledger: Ledger, switchable: SwitchableModel, configs: Sequence[Config], example: Any, options: SearchOptions
) -> dict[Config, Interval]:
    """Microseconds of whole configurations, side by side in one run."""
    configs = list(dict.fromkeys(configs))

    def measure() -> list[list[float]]:
        effort = Effort(max_seconds=options.latency_seconds, tolerance=0.01)
        times = measure_configurations(
            switchable, configs, example, effort=effort, clock=options.clock, seed=options.seed
        )
        return [list(times[config]) for config in configs]

    rows = ledger.plain("candidates timed", str(configs), measure, len(configs), len(configs))
    return {config: (row[0], row[1], row[2]) for config, row in zip(configs, rows, strict=True)}


def first_tables(
    ledger: Ledger, switchable: SwitchableModel, loss: LossOfOutputs, task: TaskMetric | None, options: SearchOptions
) -> list[list[float]]:
    """[groups][formats]: what the model loses when one group alone has a format; 0 where it cannot have it."""
    scoring = Scoring(switchable, loss, task, seed=options.seed)
    scorer: Scorer = SCORERS.find(options.sensitivity or options.metric)(scoring)
    if scorer.evaluator is None:
        return scorer.scored(ledger, "sensitivities")
    start = switchable.uniform(0)
    key = "loss" if scorer.evaluator.unit == loss.unit else scorer.name
    asked = [single(start, g, f) for g, f in scoring.cells()]
    return scorer.filled(ledger.numbers("sensitivities", asked, scorer.evaluator, key=key))


def single(start: Config, group: int, format_index: int) -> Config:
    """The float configuration with one group lowered."""
    return (*start[:group], format_index, *start[group + 1 :])
