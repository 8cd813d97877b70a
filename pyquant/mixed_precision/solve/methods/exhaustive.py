"""Every configuration: the truth, for problems that are small enough."""

from __future__ import annotations

import itertools

import numpy as np

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve.solver import Search, search_algorithm


@search_algorithm("exhaustive")
def exhaustive(search: Search) -> None:
    """All allowed configurations that keep the constraints, in the order of tuples.

    Raises ArgumentError where they are more than the budget.
    """
    needed = search.problem.num_configs - len(search.measurements.losses)
    if needed > search.measurements.budget:
        raise ArgumentError("budget", search.measurements.budget, f"at least {needed}: all configurations")
    choices = [np.flatnonzero(row).tolist() for row in search.problem.mask]
    search.measure_all(itertools.product(*choices))
