"""Never slower: options that cannot pay are dropped before the search, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve.problem import Mask, SearchProblem, Table


@dataclass(frozen=True)
class Dropped:
    """An option that is left out of the search, and why."""

    group: str
    format: str
    reason: str


def drop_slower(
    problem: SearchProblem, margin: float = 0.01, text: Callable[[float], str] = "{:g}".format
) -> tuple[SearchProblem, tuple[Dropped, ...]]:
    """The problem without options that cannot pay. -> (problem, what was dropped).

    Dropped is what, whatever formats the neighbours have (conversions count),
    1. costs more than (1 - margin) x the first format's cost in that group, or
    2. costs and loses no less than another format that is kept,
    and has no less of anything that a constraint limits: limits come before this preference.
    The second rule never removes a point of the front, only copies of equal points; the first one gives up what is
    within the margin of a measurement. The first format is dropped by the second rule only where it is kept: never.

    text(cost) writes costs in reasons.

    Example:
        >>> problem = SearchProblem(("a",), ("fp32", "int8", "int4"), loss=[[0, 1, 2]], cost=[[8, 5, 7.99]])
        >>> drop_slower(problem)[1][0].reason
        'costs 7.99 and more where fp32 costs 8: not faster by 1 %'
    """
    if not 0 <= margin < 1:
        raise ArgumentError("never_slower_margin", margin, "0 to below 1")
    mask = np.array(problem.mask)
    dropped: list[Dropped] = []
    changed = True
    while changed:
        changed = False
        for g in range(len(problem.groups)):
            for f in range(1, len(problem.formats)):
                reason = _reason(problem, mask, g, f, margin, text) if mask[g, f] else None
                if reason is not None:
                    mask[g, f] = False
                    dropped.append(Dropped(problem.groups[g], problem.formats[f], reason))
                    changed = True  # what is gone can no longer be a neighbour, so look at the others again
    return problem.with_(allowed=mask), tuple(dropped)


def _reason(
    problem: SearchProblem, mask: Mask, g: int, f: int, margin: float, text: Callable[[float], str]
) -> str | None:
    names, first = problem.formats, float(problem.cost[g, 0])
    for other in np.flatnonzero(mask[g]):
        if other == f or any(c.table[g, f] < c.table[g, other] for c in problem.constraints):
            continue
        cost = _difference(problem, mask, "cost", g, f, int(other)).min()
        if other == 0 and cost > -margin * first:
            ours = float(problem.cost[g, f])
            return f"costs {text(ours)} and more where {names[0]} costs {text(first)}: not faster by {margin * 100:g} %"
        loss = _difference(problem, mask, "loss", g, f, int(other)).min()
        if cost >= 0 and loss >= 0 and (cost > 0 or loss > 0 or other < f):
            return f"costs and loses no less than {names[other]}"
    return None


def _difference(problem: SearchProblem, mask: Mask, what: str, g: int, f: int, other: int) -> Table:
    """What f adds over `other` in group g for all formats of the neighbours: float64 [before, after]."""
    table: Table = getattr(problem, what)
    pairs: Table | None = getattr(problem, f"{what}_pairs")
    alone = float(table[g, f] - table[g, other])
    before = after = np.zeros(1)
    if pairs is not None and g > 0:
        before = (pairs[g - 1, :, f] - pairs[g - 1, :, other])[mask[g - 1]]
    if pairs is not None and g + 1 < len(problem.groups):
        after = (pairs[g, f, :] - pairs[g, other, :])[mask[g + 1]]
    return alone + before[:, None] + after[None, :]
