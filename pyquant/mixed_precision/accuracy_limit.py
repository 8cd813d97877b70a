"""Which points of a front hold an accuracy limit, from few evaluations, without selecting noise.

Among many configurations some hold a limit by chance: a task metric over a few thousand samples is noisy, and the
cheapest of all that passed is one that noise chose. The label-free loss is far less noisy and orders configurations
well, so drops are smoothed to rise with it (isotonic regression), and a point must pass by itself and by the trend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

_LEAST_SHARE: Final = 0.25


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to the values in least squares, by pooling adjacent violators.

    Source: Ayer, Brunk, Ewing, Reid, Silverman 1955, doi:10.1214/aoms/1177728423.
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        block = (value, 1)
        while blocks and blocks[-1][0] >= block[0]:
            mean, count = blocks.pop()
            block = ((mean * count + block[0] * block[1]) / (count + block[1]), count + block[1])
        blocks.append(block)
    return [mean for mean, count in blocks for _ in range(count)]


def within_limit(
    losses: Sequence[float],
    drop_of: Callable[[int], float],
    limit: float,
    evaluations: int,
    known: Mapping[int, float] = MappingProxyType({}),
    spend: bool = True,
) -> tuple[list[int], dict[int, float]]:
    """Points whose drop stays within a limit, found by bisection over the loss.

    losses       of the points, small is better; any order.
    drop_of      index -> drop, expensive; called at most `evaluations` times, each index once.
    limit        the largest drop that is allowed.
    known        drops that need no evaluation; bisection begins where they leave it.
    spend        whether what bisection leaves of the evaluations goes to the points round the edge.
    ->           (indices that hold it by themselves and by the trend of all that was evaluated, {index: drop}).
    The points of least loss are kept in mind whatever bisection says: where the best one does not hold the limit, the
    first list is empty.
    """
    order = sorted(range(len(losses)), key=lambda i: (losses[i], i))
    drops = dict(known)
    most = len(drops) + evaluations
    low, high = _edge(order, drops, limit)
    while high - low > 1 and len(drops) < most:
        middle = (low + high) // 2
        drops[order[middle]] = drop_of(order[middle])
        low, high = (middle, high) if drops[order[middle]] <= limit else (low, middle)
    # Round the edge: bisection takes the first crossing that it meets, and the trend needs neighbours.
    for at in sorted(range(len(order)), key=lambda at: (abs(at - low), at)) if spend else ():
        if len(drops) >= most:
            break
        if order[at] not in drops:
            drops[order[at]] = drop_of(order[at])
    evaluated = [i for i in order if i in drops]
    trend = dict(zip(evaluated, isotonic([drops[i] for i in evaluated]), strict=True))
    return sorted(i for i in evaluated if drops[i] <= limit and trend[i] <= limit), drops


def loss_at_limit(pairs: Iterable[tuple[float, float]], limit: float) -> float | None:
    """The loss at which the drop seems to reach a limit: linear between the last point whose trend holds it and the
    next one. None: all points hold it, or none does.

    pairs  (loss, drop) of what was evaluated.

    Example:
        >>> loss_at_limit([(0.0, 0.0), (1.0, 0.004), (2.0, 0.024)], limit=0.014)
        1.5
    """
    ordered = sorted(pairs)
    trend = isotonic([drop for _, drop in ordered])
    holds = sum(drop <= limit for drop in trend)
    if holds in (0, len(trend)):
        return None
    (low, high), (before, after) = (trend[holds - 1], trend[holds]), (ordered[holds - 1][0], ordered[holds][0])
    # metrics have steps, on which the limit may lie at the end of one: never quite at the point that holds it
    share = max((limit - low) / (high - low), _LEAST_SHARE)
    return before + share * (after - before)


def _edge(order: Sequence[int], drops: Mapping[int, float], limit: float) -> tuple[int, int]:
    """Positions in the order between which the limit lies by the trend of known drops: the first holds it, the second
    does not; -1 and the length where nothing is known."""
    known = [at for at, i in enumerate(order) if i in drops]
    trend = isotonic([drops[order[at]] for at in known])
    holds = sum(drop <= limit for drop in trend)
    return known[holds - 1] if holds else -1, known[holds] if holds < len(known) else len(order)
