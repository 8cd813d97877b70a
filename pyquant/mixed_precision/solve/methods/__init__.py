"""The search algorithms: one file each, registered by its name when this package is imported."""

from pyquant.mixed_precision.solve.methods import active, bisection, exhaustive, greedy, nsga2  # noqa: F401
