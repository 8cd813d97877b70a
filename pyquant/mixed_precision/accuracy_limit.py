"""Which points of a front hold an accuracy limit, from few evaluations, without selecting noise.

Among many configurations some hold a limit by chance: a task metric over a few thousand samples is noisy, and the
cheapest of all that passed is one that noise chose. The label-free loss is far less noisy and orders configurations
well, so drops are smoothed to rise with it (isotonic regression), and a point must pass by itself and by the trend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


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
    losses: Sequence[float], drop_of: Callable[[int], float], limit: float, evaluations: int
) -> tuple[list[int], dict[int, float]]:
    """Points whose drop stays within a limit, found by bisection over the loss.

    losses       of the points, small is better; any order.
    drop_of      index -> drop, expensive; called at most `evaluations` times, each index once.
    limit        the largest drop that is allowed.
    ->           (indices that hold it by themselves and by the trend of all that was evaluated, {index: drop}).
    The points of least loss are kept in mind whatever bisection says: where the best one does not hold the limit, the
    first list is empty.
    """
    order = sorted(range(len(losses)), key=lambda i: (losses[i], i))
    drops: dict[int, float] = {}
    low, high = -1, len(order)  # positions: low holds the limit, high does not
    while high - low > 1 and len(drops) < evaluations:
        middle = (low + high) // 2
        drops[order[middle]] = drop_of(order[middle])
        low, high = (middle, high) if drops[order[middle]] <= limit else (low, middle)
    # Round the edge: bisection takes the first crossing that it meets, and the trend needs neighbours.
    around = sorted(range(len(order)), key=lambda at: (abs(at - low), at))
    for at in around:
        if len(drops) >= evaluations:
            break
        if order[at] not in drops:
            drops[order[at]] = drop_of(order[at])
    evaluated = [i for i in order if i in drops]
    trend = dict(zip(evaluated, isotonic([drops[i] for i in evaluated]), strict=True))
    return sorted(i for i in evaluated if drops[i] <= limit and trend[i] <= limit), drops
