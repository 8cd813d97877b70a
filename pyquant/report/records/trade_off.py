"""TradeOff: configurations of a model as points of cost against quality, with the front and what a picture marks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pyquant.report.records.pareto import pareto_front
from pyquant.report.records.record import record

_SPELT, _NAMED = 8, 3  # most groups whose formats are listed in order; most names listed of a rarer format


@dataclass(frozen=True)
class TradeOffAxis:
    """What one axis says.

    name        such as 'latency' or 'representational capacity'.
    unit        such as 'us' or 'bits'; '' for a plain number.
    definition  how it was found, or its formula; written at the axis.
    """

    name: str
    unit: str = ""
    definition: str = ""

    def text(self, unit: str | None = None) -> str:
        """The label of the axis; unit: another one than its own."""
        name = f"{self.name}: {self.definition}" if self.definition else self.name
        unit = self.unit if unit is None else unit
        return f"{name}, in {unit}" if unit else name


@dataclass(frozen=True)
class TradeOffPoint:
    """One configuration.

    configuration  format of each group of layers, {group: format}; all points of a record name the same groups.
    cost           in the unit of its axis, of latencies the median; low, high: its interval (10th and 90th percentile
                   where nothing else is said), None where there is none.
    quality        capacity, loss, accuracy ...: the other axis.
    measured       False: predicted.
    on_front       not dominated (see trade_off); chosen: what a search took.
    figures        further numbers that pages and tables show, such as {'mean_us': 812.5}.
    """

    configuration: dict[str, str]
    cost: float
    quality: float
    low: float | None = None
    high: float | None = None
    measured: bool = True
    on_front: bool = False
    chosen: bool = False
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def uniform(self) -> str | None:
        """The one format of all groups, or None."""
        formats = set(self.configuration.values())
        return next(iter(formats)) if len(formats) == 1 else None


@dataclass(frozen=True)
class TradeOffLine:
    """A cost to compare with: a vertical line, 'uniform int8'. quality: that of its point; None: it has none."""

    name: str
    cost: float
    quality: float | None = None


@dataclass(frozen=True)
class EqualPair:
    """Two points of equal quality, as indices into the points, and what the fast one saves: 1 - t_fast / t_slow."""

    slow: int
    fast: int
    reduction: float


@record("trade-off")
@dataclass(frozen=True)
class TradeOff:
    """Points of cost (latency, size ...) against quality. `trade_off` makes one and marks what can be computed.

    cost, quality      what the axes are; small costs are good.
    higher_is_better   True: capacity, accuracy. False: loss.
    groups, formats    names of the groups of layers, and of the formats with the float one first: the order of tables
                       and legends, which the mappings of a file do not keep.
    points             in the order in which they were given.
    lines              latencies to compare with; the first one is the baseline of reductions.
    pair               the largest difference between points of equal quality, or None.
    environment        what was measured on, {'': machine, 'torch': ...}.
    notes, command     sentences for people; the command that makes it again.
    """

    title: str
    cost: TradeOffAxis
    quality: TradeOffAxis
    higher_is_better: bool
    groups: tuple[str, ...]
    formats: tuple[str, ...]
    points: tuple[TradeOffPoint, ...]
    lines: tuple[TradeOffLine, ...] = ()
    pair: EqualPair | None = None
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    command: str = ""

    @property
    def front(self) -> tuple[TradeOffPoint, ...]:
        """The points on the front, the fastest first."""
        return tuple(sorted((p for p in self.points if p.on_front), key=lambda p: p.cost))

    @property
    def caption(self) -> str:
        """The environment in one line."""
        return "; ".join(f"{name} {text}" if name else text for name, text in sorted(self.environment.items()))

    def text_of(self, point: TradeOffPoint) -> str:
        """A point's configuration in few characters: 'all int8', or the formats in the order of the groups.

        Of more than eight groups: how many have each format, and the names of those few that have the rarer ones.
        """
        formats = [point.configuration[group] for group in self.groups]
        if len(self.groups) <= _SPELT or len(set(formats)) == 1:
            return configuration_text(formats)
        parts: list[str] = []
        for name, count in Counter(formats).most_common():
            named = [group for group, format in zip(self.groups, formats, strict=True) if format == name]
            parts.append(f"{count} x {name}" + (f" ({', '.join(named)})" if parts and count <= _NAMED else ""))
        return ", ".join(parts)


def trade_off(
    points: Sequence[TradeOffPoint],
    title: str,
    cost: TradeOffAxis,
    quality: TradeOffAxis,
    *,
    higher_is_better: bool,
    formats: Sequence[str],
) -> TradeOff:
    """A TradeOff with its front, its uniform lines and its pair marked; add the rest with dataclasses.replace.

    points   at least one; all name the same groups, whose order is the first one's. Where some are measured and some
             predicted, only measured ones are compared; the front of predictions alone is a prediction.
    formats  every format that a configuration names, the float one first; a line is drawn for each uniform one.
    Raises ValueError naming the point that is wrong.

    Example:
        >>> points = [TradeOffPoint({"a": "fp32"}, 9.0, 16.0), TradeOffPoint({"a": "int8"}, 5.0, 8.0)]
        >>> made = trade_off(points, "t", TradeOffAxis("latency", "us"), TradeOffAxis("capacity", "bits"),
        ...                  higher_is_better=True, formats=("fp32", "int8"))
        >>> [point.on_front for point in made.points], [line.name for line in made.lines]
        ([True, True], ['uniform fp32', 'uniform int8'])
    """
    _check(points, formats)
    compared = [i for i, p in enumerate(points) if p.measured] or list(range(len(points)))
    sign = -1.0 if higher_is_better else 1.0
    places = pareto_front([(points[i].cost, sign * points[i].quality) for i in compared])
    front = {compared[place] for place in places}
    marked = tuple(replace(p, on_front=i in front) for i, p in enumerate(points))
    lines = []
    for name in formats:
        of_name = [points[i] for i in compared if points[i].uniform == name]
        if of_name:
            lines.append(TradeOffLine(f"uniform {name}", of_name[0].cost, of_name[0].quality))
    pair = largest_spread([points[i].cost for i in compared], [points[i].quality for i in compared])
    if pair is not None:
        pair = EqualPair(compared[pair.slow], compared[pair.fast], pair.reduction)
    groups = tuple(points[0].configuration)
    return TradeOff(title, cost, quality, higher_is_better, groups, tuple(formats), marked, tuple(lines), pair)


def largest_spread(latencies: Sequence[float], qualities: Sequence[float]) -> EqualPair | None:
    """The largest 1 - t_min / t_max among points of exactly equal quality; None where no two differ in latency."""
    ends: dict[float, tuple[int, int]] = {}
    for i, (latency, quality) in enumerate(zip(latencies, qualities, strict=True)):
        slow, fast = ends.get(quality, (i, i))
        ends[quality] = (i if latency > latencies[slow] else slow, i if latency < latencies[fast] else fast)
    pairs = [EqualPair(slow, fast, 1 - latencies[fast] / latencies[slow]) for slow, fast in ends.values()]
    best = max(pairs, key=lambda pair: pair.reduction, default=None)
    return best if best is not None and best.reduction > 0 else None


def configuration_text(formats: Sequence[str]) -> str:
    """Formats in few characters."""
    return f"all {formats[0]}" if len(formats) > 1 and len(set(formats)) == 1 else " ".join(formats)


def _check(points: Sequence[TradeOffPoint], formats: Sequence[str]) -> None:
    if not points:
        raise ValueError("points: none; allowed: at least one")
    groups = points[0].configuration.keys()
    for i, point in enumerate(points):
        if point.configuration.keys() != groups:
            text = f"groups {list(point.configuration)}; allowed: those of points[0], {list(groups)}"
            raise ValueError(f"points[{i}]: {text}")
        unknown = sorted(set(point.configuration.values()) - set(formats))
        if unknown:
            raise ValueError(f"points[{i}]: format {unknown[0]!r}; allowed: {', '.join(formats)}")
        if not (math.isfinite(point.cost) and point.cost > 0):
            raise ValueError(f"points[{i}]: cost {point.cost}; allowed: finite and > 0")
        if not math.isfinite(point.quality):
            raise ValueError(f"points[{i}]: quality {point.quality}; allowed: a finite number")
