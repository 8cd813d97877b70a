"""From readings to a table: what each group takes in each format, what borders add, and what is left for the base.

Medians of parts do not add up to the median of a whole where noise is lopsided, as it is on a busy machine. So whole
forwards are chosen by their totals, the middle half of each configuration, and of those everything is a mean: then
parts add up, and a forward that was disturbed anywhere is out.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pyquant.mixed_precision.choices.switchable import Config
from pyquant.mixed_precision.latency.samples import Forward, Samples, median_interval

Groups = Sequence[Sequence[str]]  # names of the layers of each group
Points = Sequence[tuple[float, float]]  # (sum of the parts, total)
Cell = tuple[float, float, float]  # us, low, high
_LEAST_SCALE = 0.5  # further from 1 is no calibration any more but a wrong model


@dataclass(frozen=True)
class Estimate:
    """groups {(group, format): (us, low, high)}; layers {(layer, format): us}; borders {(group, before, format): us
    more than with the best format before}, or None; base; scale by which all of it was multiplied."""

    groups: Mapping[tuple[int, int], Cell]
    layers: Mapping[tuple[str, int], float]
    borders: Mapping[tuple[int, int, int], float] | None
    base: float = 0.0
    scale: float = 1.0

    def of(self, config: Config) -> float:
        """The latency of a configuration."""
        parts = [self.base, *(self.groups[g, f][0] for g, f in enumerate(config) if (g, f) in self.groups)]
        if self.borders is not None:
            parts += [self.borders.get((g + 1, *pair), 0.0) for g, pair in enumerate(pairwise(config))]
        return math.fsum(parts)


def estimate(samples: Samples, groups: Groups, borders: bool, fitted: Sequence[Config]) -> Estimate:
    """fitted: configurations of `totals` that may be used; those that are to check the table are not among them."""
    samples = samples.steadied()
    totals = {config: statistics.median(us for _, us in samples.totals[config]) for config in fitted}
    if not samples.forwards:
        return _calibrated(_from_isolated(samples, groups), totals)
    return _calibrated(_from_forwards(samples.forwards, groups, borders), totals)


def _from_forwards(forwards: Sequence[Forward], groups: Groups, borders: bool) -> Estimate:
    """A format also acts on what runs after its layers: wide weights push activations out of the cache. What passes
    until the next layer, beyond the least of all formats, is counted as the group's."""
    central = _middle_halves(forwards)
    cells: dict[tuple[int, int], Cell] = {}
    layers: dict[tuple[str, int], float] = {}
    added: dict[tuple[int, int, int], float] = {}
    for g, names in enumerate(groups):
        inside = _columns(central, lambda f, names=names: _sum_of(f, names))  # type: ignore[misc]
        after = _by_format(_means(_columns(central, lambda f, g=g: f.after.get(g))), g)  # type: ignore[misc]
        gap = _means(_columns(central, lambda f, g=g: f.gap.get(g)))  # type: ignore[misc]
        for name in names:
            of_layer = _means(_columns(central, lambda f, name=name: f.layers.get(name)))  # type: ignore[misc]
            layers |= {(name, f): us for f, us in _by_format(of_layer, g).items()}
        pairs = _by_neighbour(_means(inside), gap, g) if borders and g else {}
        for f, us in _by_format(_means(inside), g).items():
            if pairs:
                least = min(value for (_, own), value in pairs.items() if own == f)
                added |= {(g, before, f): value - least for (before, own), value in pairs.items() if own == f}
                us = least
            if not borders or g == len(groups) - 1:  # otherwise the border has it
                us += after[f] - min(after.values())
            half = _half_width([v for config, column in inside.items() if config[g] == f for v in column])
            cells[g, f] = (us, max(0.0, us - half), us + half)
    return Estimate(cells, layers, added if borders else None)


def _middle_halves(forwards: Sequence[Forward]) -> dict[Config, list[Forward]]:
    by_config: dict[Config, list[Forward]] = defaultdict(list)
    for forward in forwards:
        by_config[forward.config].append(forward)
    central = {}
    for config, rows in by_config.items():
        rows.sort(key=lambda f: f.total)
        out = len(rows) // 4
        central[config] = rows[out : len(rows) - out]
    return central


def _columns(
    forwards: Mapping[Config, Sequence[Forward]], value: Callable[[Forward], float | None]
) -> dict[Config, list[float]]:
    """{configuration: the values of its forwards}, without configurations that have none."""
    columns = {config: [us for f in rows if (us := value(f)) is not None] for config, rows in forwards.items()}
    return {config: column for config, column in columns.items() if column}


def _means(columns: Mapping[Config, Sequence[float]]) -> dict[Config, float]:
    return {config: statistics.fmean(column) for config, column in columns.items()}


def _by_format(means: Mapping[Config, float], group: int) -> dict[int, float]:
    """{format of the group: the mean over the configurations that have it}."""
    by_format: dict[int, list[float]] = defaultdict(list)
    for config, us in means.items():
        by_format[config[group]].append(us)
    return {f: statistics.fmean(values) for f, values in by_format.items()}


def _sum_of(forward: Forward, names: Sequence[str]) -> float | None:
    """us of the layers; None where none of them was called."""
    times = [forward.layers[name] for name in names if name in forward.layers]
    return math.fsum(times) if times else None


def _by_neighbour(
    inside: Mapping[Config, float], gap: Mapping[Config, float], group: int
) -> dict[tuple[int, int], float]:
    """{(format of the previous group, own): us of the group, with what the gap before it takes beyond the least}."""
    by_pair: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for config, us in inside.items():
        by_pair[config[group - 1], config[group]].append((us, gap[config]))
    means = {pair: [statistics.fmean(column) for column in zip(*rows, strict=True)] for pair, rows in by_pair.items()}
    least = min(gap for _, gap in means.values())
    return {pair: us + gap - least for pair, (us, gap) in means.items()}


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _from_isolated(samples: Samples, groups: Groups) -> Estimate:
    """Medians of layers that were timed alone; the interval of a group is as wide as those of its layers together."""
    cells: dict[tuple[int, int], Cell] = {}
    layers = {key: statistics.median(values) for key, values in samples.isolated.items()}
    for g, names in enumerate(groups):
        for f in sorted({f for name, f in samples.isolated if name == names[0]}):
            parts = [median_interval(samples.isolated[name, f]) for name in names]
            us, low, high = (math.fsum(column) for column in zip(*parts, strict=True))
            cells[g, f] = (us, low, high)
    return Estimate(cells, layers, None)


def _calibrated(raw: Estimate, totals: Mapping[Config, float]) -> Estimate:
    """The base, and a scale for everything else where that predicts configurations better that it was not fitted to:
    layers take longer the more of the others are wide, and longer alone than among the others."""
    points = [(raw.of(config), total) for config, total in totals.items()]
    fits = (fit_base, fit_line) if len(points) > 2 else (fit_base,)
    base, scale = min(fits, key=lambda fit: _left_out_error(fit, points))(points)
    groups = {key: (us * scale, low * scale, high * scale) for key, (us, low, high) in raw.groups.items()}
    borders = raw.borders and {key: us * scale for key, us in raw.borders.items()}
    return Estimate(groups, {key: us * scale for key, us in raw.layers.items()}, borders, base, scale)


def _left_out_error(fit: Callable[[Points], tuple[float, float]], points: Points) -> float:
    """Mean square of predicted / total - 1 for each point by a fit to the others; ties go to the first of two fits."""
    errors = []
    for i, (part, total) in enumerate(points):
        base, scale = fit([*points[:i], *points[i + 1 :]] or points)
        errors.append((base + scale * part) / total - 1 if total > 0 else 0.0)
    return round(statistics.fmean(e * e for e in errors), 9)


def fit_base(points: Points) -> tuple[float, float]:
    """(mean rest, 1): the design is balanced, so its mean is right for the mean of all configurations."""
    return max(0.0, statistics.fmean(total - part for part, total in points)), 1.0


def fit_line(points: Points) -> tuple[float, float]:
    """(base, scale) with the least squares of (base + scale * sum) / total - 1 for (sum, total); base >= 0.

    Where the points do not determine a scale, or it would be far from 1, the same as fit_base.
    """
    rows = np.array([[1 / total, part / total] for part, total in points if total > 0 and part > 0])
    if len(rows) > 1:
        ones = np.ones(len(rows))
        base, scale = (float(v) for v in np.linalg.lstsq(rows, ones, rcond=None)[0])
        if base < 0:
            base, scale = 0.0, float(np.linalg.lstsq(rows[:, 1:], ones, rcond=None)[0][0])
        if _LEAST_SCALE <= scale <= 1 / _LEAST_SCALE:
            return round(base, 9), round(scale, 12)
    return fit_base(points)
