"""SearchOptions: everything about a search that has a default, checked before any work begins."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyquant.core import arguments
from pyquant.core.registry import SCORERS, SEARCH_ALGORITHMS
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.groups import Grouping
from pyquant.mixed_precision.loss.metrics import find_metric
from pyquant.nn.sites import Filter
from pyquant.results.latency import LatencyTable


@dataclass(frozen=True)
class SearchOptions:
    """Keywords of pyquant.search.

    metric         label-free loss of a configuration's outputs against the float model's: 'kl' (of logits), 'sqnr',
                   'mse', 'cosine'.
    sensitivity    where the first tables come from; '' measures `metric` with one group lowered at a time, 'fisher'
                   needs one forward and one backward pass, others are in docs/sensitivity.md.
    algorithm      'dp' (exact front of a model that is refitted to what was measured), 'exhaustive', 'greedy',
                   'bisection', 'nsga2'.
    budget         configurations whose loss is measured, at most.
    batch          configurations proposed at once, for several processes; the plan depends on it, not on their number.
    max_loss, max_latency_us, max_size_bytes, max_effective_bits   limits, None: no limit.
    higher_is_better  whether more of eval_fn is better.
    evaluations    calls of eval_fn, at most, the float model's aside.
    candidates     configurations that are timed end to end before one is chosen.
    never_slower_margin  a format or a plan that is not faster by this share is not taken.
    score_data     batches for losses; None: those that calibrated. Held-out data is better.
    num_batches    how many batches calibrate, and how many of score_data are used; None: 16, or all of fewer.
    batch_to_inputs, grouping, filter_fn, to_output   as in SwitchableModel: the form of batches, which layers share a
                   format, which have a choice, which tensor of the output counts.
    latency        a LatencyTable, or the path of one, of this device and these layers; None: measured.
    latency_seconds  wall time for measuring the table, about.
    clock          'cpu', 'wall', 'cuda-graph'; None: what suits the device.
    journal        file that every finished piece of work is appended to; a killed search goes on from it.
    seed           of everything that is drawn.
    progress       called with (what, done, total) after every piece.
    """

    metric: str = "kl"
    sensitivity: str = ""
    algorithm: str = "dp"
    budget: int = 40
    batch: int = 1
    max_loss: float | None = None
    max_latency_us: float | None = None
    max_size_bytes: float | None = None
    max_effective_bits: float | None = None
    higher_is_better: bool = True
    evaluations: int = 12
    candidates: int = 5
    never_slower_margin: float = 0.01
    score_data: Iterable[Any] | None = None
    num_batches: int | None = None
    batch_to_inputs: Callable[[Any], Any] | None = None
    grouping: Grouping = "auto"
    filter_fn: Filter | None = None
    to_output: Callable[[Any], Tensor] | None = None
    latency: LatencyTable | str | os.PathLike[str] | None = None
    latency_seconds: float = 60.0
    clock: str | None = None
    journal: str | os.PathLike[str] | None = None
    seed: int = 0
    progress: Callable[[str, int, int], None] | None = None

    @staticmethod
    def of(keywords: dict[str, Any]) -> SearchOptions:
        """Options from keywords. Raises ArgumentError for unknown names and wrong values."""
        known = [f.name for f in dataclasses.fields(SearchOptions)]
        unknown = [name for name in keywords if name not in known]
        if unknown:
            raise ArgumentError(unknown[0], repr(keywords[unknown[0]])[:120], f"keywords {', '.join(known)}")
        return SearchOptions(**keywords)

    def __post_init__(self) -> None:
        find_metric(self.metric)
        if self.sensitivity:
            SCORERS.find(self.sensitivity, "sensitivity")
        SEARCH_ALGORITHMS.find(self.algorithm)
        for name in ("budget", "batch", "evaluations", "candidates", "num_batches"):
            value = getattr(self, name)
            if value is None and name == "num_batches":
                continue
            arguments.whole(name, value, 1)
        for name in ("max_loss", "max_latency_us", "max_size_bytes", "max_effective_bits"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
                raise ArgumentError(name, repr(value), "a number >= 0, or None")
        if not 0 <= self.never_slower_margin < 1:
            raise ArgumentError("never_slower_margin", repr(self.never_slower_margin), "a number in [0, 1)")
        if not self.latency_seconds > 0:
            raise ArgumentError("latency_seconds", repr(self.latency_seconds), "a number > 0")

    def limits(self) -> dict[str, float]:
        """{name: limit} of those that are set."""
        names = ("max_loss", "max_latency_us", "max_size_bytes", "max_effective_bits")
        return {name: float(getattr(self, name)) for name in names if getattr(self, name) is not None}

    def settings(self) -> dict[str, str]:
        """What the result depends on, as text."""
        names = (
            "metric", "sensitivity", "algorithm", "budget", "batch", "higher_is_better", "evaluations", "candidates",
            "never_slower_margin", "num_batches", "clock", "seed",
        )  # fmt: skip
        found = {name: str(getattr(self, name)) for name in names}
        return found | {name: f"{limit:g}" for name, limit in self.limits().items()}
