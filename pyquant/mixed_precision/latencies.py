"""Latencies of a search: the table that predicts, and the candidates as they really run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.latency.measure import latency_fingerprint, load_latency, measure_latency
from pyquant.mixed_precision.latency.whole import measure_configurations
from pyquant.mixed_precision.options import SearchOptions
from pyquant.mixed_precision.work import Work
from pyquant.results.latency import LatencyTable
from pyquant.results.record import from_plain, to_plain

Interval = tuple[float, float, float]  # median, low, high


def latency_table(work: Work, switchable: SwitchableModel, example: Any, options: SearchOptions) -> LatencyTable:
    """The table that was given, once its fingerprint is this machine's, or one that is measured now."""
    if isinstance(options.latency, LatencyTable):
        options.latency.require(latency_fingerprint(switchable, example))
        return options.latency
    if options.latency is not None:
        return load_latency(os.fspath(options.latency), switchable, example)

    def measure() -> dict[str, Any]:
        table = measure_latency(
            switchable, example, max_seconds=options.latency_seconds, clock=options.clock, seed=options.seed
        )
        return to_plain(table)

    table: LatencyTable = from_plain(work.plain("latency table", "", measure))
    return table


def timed(
    work: Work, switchable: SwitchableModel, configs: Sequence[Config], example: Any, options: SearchOptions
) -> dict[Config, Interval]:
    """Microseconds of whole configurations, side by side in one run."""
    configs = list(dict.fromkeys(configs))

    def measure() -> list[list[float]]:
        found = measure_configurations(
            switchable, configs, example, max_seconds=options.latency_seconds, clock=options.clock, seed=options.seed
        )
        return [list(found[config]) for config in configs]

    rows = work.plain("candidates timed", str(configs), measure)
    return {config: (row[0], row[1], row[2]) for config, row in zip(configs, rows, strict=True)}
