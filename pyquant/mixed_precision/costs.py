"""What a configuration costs: microseconds, bytes or bits, as tables over groups and formats. @objective adds one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pyquant.core.registry import OBJECTIVES
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.report.records.float_format import alike
from pyquant.report.records.latency import LatencyTable
from pyquant.report.records.search import SHOWN

Rows = list[list[float]]


@dataclass(frozen=True)
class CostTable:
    """table [groups][formats] (0 where a group cannot take a format), base: the rest of the model, pairs
    [groups - 1][formats][formats] or None: what borders between formats add. unit: of all of them."""

    unit: str
    table: Rows
    base: float = 0.0
    pairs: list[Rows] | None = None

    def text(self, value: float) -> str:
        """A cost with its unit, as tables of a report have it."""
        by, unit = SHOWN.get(self.unit, (1.0, self.unit))
        return f"{value / by:.4g} {unit}"


def objective(name: str) -> Callable[[Callable[..., CostTable]], Callable[..., CostTable]]:
    """Register a function (switchable model, latency table or None) -> CostTable under a name that is not taken."""
    return OBJECTIVES.register(name)


def cost_table(name: str, model: SwitchableModel, latency: LatencyTable | None) -> CostTable:
    """The table of an objective. Raises ArgumentError for an unknown one."""
    table: CostTable = OBJECTIVES.find(name)(model, latency)
    return table


@objective("latency")
def latency_cost(model: SwitchableModel, latency: LatencyTable | None) -> CostTable:
    """Measured microseconds of every group, the rest of the model, and conversions at borders."""
    if latency is None:
        raise ArgumentError("latency", "None", "a LatencyTable for objective 'latency'")
    formats = [f.name for f in model.formats]
    if latency.groups != tuple(g.name for g in model.groups) or not alike(latency.formats, formats):
        raise ArgumentError(
            "latency",
            "a table of other groups or formats",
            "one that measure_latency made of this model, these formats and this grouping",
        )
    pairs = None
    if latency.border_us is not None:
        pairs = [[[us or 0.0 for us in row] for row in border] for border in latency.border_us]
    return CostTable("us", [[us or 0.0 for us in row] for row in latency.group_us], latency.base_us, pairs)


@objective("size")
def size_cost(model: SwitchableModel, latency: LatencyTable | None = None) -> CostTable:
    """Bytes of all weights, scales and zero points in a file, int4 two in a byte."""
    table = [[float(n) for n in row] for row in model.group_bytes()]
    return CostTable("bytes", table, float(model.other_bytes()))


@objective("effective_bits")
def bits_cost(model: SwitchableModel, latency: LatencyTable | None = None) -> CostTable:
    """Bits a weight on average over the quantisable weights, its share of the scales and zero points included, as they
    are in the bytes of `size`: 4.25 of 4-bit codes with a float32 scale for 128. A weight that stays in floating point
    has those of its dtype."""
    total = math.fsum(model.numel)
    table = [[bits / total for bits in row] for row in model.group_bits()]
    return CostTable("bits", table)
