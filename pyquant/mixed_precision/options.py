"""SearchOptions: everything about a search that has a default, checked before any work begins."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from pyquant.core import arguments
from pyquant.core.registry import SCORERS, SEARCH_ALGORITHMS
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.groups import Grouping
from pyquant.mixed_precision.loss.metrics import find_metric
from pyquant.nn.sites import Filter
from pyquant.report.records.latency import LatencyTable

LIMITS: Final = ("max_loss", "max_latency_us", "max_size_bytes", "max_effective_bits")


@dataclass(frozen=True)
class SearchOptions:
    """The keywords of pyquant.search, whose docstring explains each."""

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
    corner_share: float | None = None
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
        names = [f.name for f in dataclasses.fields(SearchOptions)]
        unknown = [name for name in keywords if name not in names]
        if unknown:
            raise ArgumentError(unknown[0], repr(keywords[unknown[0]])[:120], f"keywords {', '.join(names)}")
        return SearchOptions(**keywords)

    def __post_init__(self) -> None:
        find_metric(self.metric)
        if self.sensitivity:
            SCORERS.find(self.sensitivity, "sensitivity")
        SEARCH_ALGORITHMS.find(self.algorithm)
        for name in ("budget", "batch", "evaluations", "candidates"):
            arguments.whole(name, getattr(self, name), 1)
        if self.num_batches is not None:
            arguments.whole("num_batches", self.num_batches, 1)
        for name in LIMITS:
            if getattr(self, name) is not None:
                arguments.number(name, getattr(self, name), 0, infinite=True)
        if not 0 <= self.never_slower_margin < 1:
            raise ArgumentError("never_slower_margin", repr(self.never_slower_margin), "a number in [0, 1)")
        if self.corner_share is not None:
            arguments.number("corner_share", self.corner_share, 0, above=True)
        arguments.number("latency_seconds", self.latency_seconds, 0, above=True, infinite=True)

    def limits(self) -> dict[str, float]:
        """{name: limit} of those that are set."""
        return {name: float(getattr(self, name)) for name in LIMITS if getattr(self, name) is not None}

    def settings(self) -> dict[str, str]:
        """What the result depends on, as text."""
        names = (
            "metric",
            "sensitivity",
            "algorithm",
            "budget",
            "batch",
            "corner_share",
            "higher_is_better",
            "evaluations",
            "candidates",
            "never_slower_margin",
            "num_batches",
            "clock",
            "seed",
        )
        return {name: str(getattr(self, name)) for name in names} | {
            name: f"{limit:g}" for name, limit in self.limits().items()
        }
