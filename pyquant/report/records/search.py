"""The record of a mixed-precision search: the choices, everything measured, what was chosen and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pyquant.report.records.float_format import renamed, with_note
from pyquant.report.records.record import record

# By what costs are divided in tables, and the unit's name then.
SHOWN: Final = {"us": (1e3, "ms"), "bytes": (1e6, "MB")}
_NAMES: Final = {"us": "latency"}


@dataclass(frozen=True)
class SearchedGroup:
    """Layers that share a format.

    numel    weights in them.
    dropped  {format: why it was no choice}: the layer cannot take it, or it is not faster.
    loss     {format: what the model loses when this group alone has it}.
    cost     {format: what the group costs in it}, in the unit of the objective.
    """

    name: str
    layers: tuple[str, ...]
    numel: int
    dropped: dict[str, str]
    loss: dict[str, float]
    cost: dict[str, float]


@dataclass(frozen=True)
class SearchedPoint:
    """A configuration that was measured.

    configuration   {group: format}.
    cost            by the tables, in the unit of the objective; size_bytes: of the model's file; effective_bits: a
                    weight on average over the groups, its scales and zero points included, those of its dtype
                    where it stays in floating point.
    loss            by the label-free metric, measured; predicted_loss: by the tables before any measurement.
    quality         of the user's eval_fn, None where it was not run; drop: what is missing to the float model's.
    latency_us      measured end to end, None where it was not; latency_low_us, latency_high_us: 95 % interval.
    predicted_us    by the latency table, None without one.
    """

    configuration: dict[str, str]
    cost: float
    size_bytes: int
    effective_bits: float
    loss: float
    predicted_loss: float
    quality: float | None = None
    drop: float | None = None
    latency_us: float | None = None
    latency_low_us: float | None = None
    latency_high_us: float | None = None
    predicted_us: float | None = None
    is_on_front: bool = False


@record("search", version=2, upgrades={1: lambda data: with_note(renamed(data))})
@dataclass(frozen=True)
class SearchReport:
    """Everything that pyquant.search found.

    model        its class. formats: names, the float one first, called by its dtype.
    groups       SearchedGroup in the order of the model.
    settings     the options of the search, as text: objective, metric, algorithm, limits, budget, seed.
    cost_unit    of costs: 'us', 'bytes', 'bits'. loss_unit, quality_name: what the other axes mean.
    points       SearchedPoint in the order in which they were measured; chosen, reference: indices into it (reference:
                 everything in floating point).
    verdict      why this point, in words.
    counts       {'scoring passes', 'configurations measured', ...}: how much work it was.
    environment  hardware and versions, as text by name.
    """

    model: str
    formats: tuple[str, ...]
    groups: tuple[SearchedGroup, ...]
    settings: dict[str, str]
    cost_unit: str
    loss_unit: str
    quality_name: str
    points: tuple[SearchedPoint, ...]
    chosen: int
    reference: int
    verdict: str
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> SearchedPoint:
        """The chosen point."""
        return self.points[self.chosen]

    @property
    def front(self) -> list[SearchedPoint]:
        """The Pareto front, the cheapest point first."""
        return sorted((p for p in self.points if p.is_on_front), key=lambda p: p.cost)

    def reasons(self) -> dict[str, str]:
        """{group: what its format costs and loses, and the same, or the obstacle, of every other format}."""
        return {group.name: "; ".join([self._figures(group), *self._others(group)]) for group in self.groups}

    def other_formats(self, group: SearchedGroup) -> str:
        """What speaks against the formats that a group did not get."""
        return "; ".join(self._others(group))

    def _others(self, group: SearchedGroup) -> list[str]:
        chosen = self.plan.configuration[group.name]
        texts = {name: self._figures(group, name) for name in group.loss} | dict(sorted(group.dropped.items()))
        return [f"{name}: {text}" for name, text in texts.items() if name not in (chosen, self.formats[0])]

    def _figures(self, group: SearchedGroup, format: str = "") -> str:
        name = format or self.plan.configuration[group.name]
        base = self.formats[0]
        if name == base:
            return f"{base}, as the model has it"
        share = group.cost[name] / max(group.cost[base], 1e-300)
        return (
            f"{'' if format else name + ', '}{share:.2f} x the {_NAMES.get(self.cost_unit, self.cost_unit)} of {base}, "
            f"loses {group.loss[name]:.3g}"
        )
