"""The plan: of the configurations that were measured, the best one that keeps every limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyquant.errors import ArgumentError, InfeasibleError
from pyquant.mixed_precision.solve.measurements import Measured
from pyquant.mixed_precision.solve.problem import Constraint

OBJECTIVES: Final = ("cost", "loss")


def choose(
    points: Sequence[Measured],
    objective: str = "cost",
    *,
    max_loss: float | None = None,
    max_cost: float | None = None,
    constraints: Sequence[Constraint] = (),
) -> Measured:
    """The measured configuration with the smallest objective among those that keep every limit.

    objective    'cost' (of equal ones the smaller loss, then the first configuration) or 'loss' (then the cost).
    max_loss     the largest measured loss; max_cost the largest cost; None: any.
    constraints  further ones: size, effective bits.
    Raises InfeasibleError with the point that comes nearest and what it misses, ArgumentError for no points at all.

    Example:
        >>> points = [Measured((0,), 8.0, 0.0, 0.0), Measured((1,), 2.0, 0.5, 0.4)]
        >>> choose(points, max_loss=0.1).config
        (0,)
        >>> choose(points, max_loss=0.1, max_cost=4.0)
        Traceback (most recent call last):
        ...
        pyquant.errors.InfeasibleError: none of 2 measured configurations keeps loss <= 0.1, cost <= 4; ...
    """
    if objective not in OBJECTIVES:
        raise ArgumentError("objective", repr(objective), " or ".join(map(repr, OBJECTIVES)))
    if not points:
        raise ArgumentError("points", "none", "at least one measured configuration")
    for name, limit in (("max_loss", max_loss), ("max_cost", max_cost)):
        if limit is not None and limit != limit:
            raise ArgumentError(name, limit, "a number or None")
    given = {"loss": max_loss, "cost": max_cost, **{c.name: c.limit for c in constraints}}
    limits = {name: float(limit) for name, limit in given.items() if limit is not None}
    totals = [{"loss": p.loss, "cost": p.cost, **{c.name: c.cost_of(p.config) for c in constraints}} for p in points]
    excess = [{n: t[n] - limits[n] for n in limits if t[n] > limits[n]} for t in totals]
    kept = [p for p, missed in zip(points, excess, strict=True) if not missed]
    if kept:
        other = "loss" if objective == "cost" else "cost"
        return min(kept, key=lambda p: (getattr(p, objective), getattr(p, other), p.config))
    # how far a point misses: the sum of what it exceeds, each in units of its limit
    spans = {n: abs(limits[n]) or max(abs(t[n]) for t in totals) or 1.0 for n in limits}
    far = [sum(amount / spans[n] for n, amount in missed.items()) for missed in excess]
    i = min(range(len(points)), key=lambda i: (far[i], i))
    wanted = ", ".join(f"{n} <= {limit:g}" for n, limit in limits.items())
    missed = ", ".join(f"{n} {totals[i][n]:g}" for n in excess[i])
    raise InfeasibleError(
        f"none of {len(points)} measured configurations keeps {wanted}; the nearest, {points[i].config}, has {missed}",
        points[i],
    )
