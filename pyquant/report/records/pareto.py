"""Pareto fronts of (cost, loss) points, both to be small, and the hypervolume that compares fronts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]


def pareto_front(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other point dominates, from the smallest first coordinate to the largest.

    points  (cost, loss) pairs, smaller is better in both. Of equal points the first is kept.
    Raises ValueError for a NaN.
    """
    if any(math.isnan(value) for point in points for value in point):
        raise ValueError("points: NaN; allowed: numbers")
    order = sorted(range(len(points)), key=lambda i: (*points[i], i))
    front: list[int] = []
    best = math.inf
    for i in order:
        if points[i][1] < best or not front:
            front.append(i)
            best = points[i][1]
    return front


def hypervolume(points: Sequence[Point], corner: Point) -> float:
    """The area between the front of the points and a corner that is worse than they are, in both coordinates' units.

    points  (cost, loss) pairs; those beyond the corner in either coordinate add nothing.
    corner  (cost, loss) of the reference point.
    """
    inside = [p for p in points if p[0] < corner[0] and p[1] < corner[1]]
    steps = [inside[i] for i in pareto_front(inside)]
    edges = [*(cost for cost, _ in steps), corner[0]]
    return sum((right - left) * (corner[1] - loss) for (left, right), (_, loss) in zip(pairwise(edges), steps))
