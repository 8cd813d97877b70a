"""Which format for which group of layers: tables and callables in, configurations out. No tensor, no module."""

from pyquant.mixed_precision.solve.front import FrontPoint, exact_front
from pyquant.mixed_precision.solve.measurements import Measured
from pyquant.mixed_precision.solve.problem import Config, Constraint, SearchProblem
from pyquant.mixed_precision.solve.prune import Dropped, drop_slower
from pyquant.mixed_precision.solve.solver import Search, search_algorithm, search_front

__all__ = [
    "Config",
    "Constraint",
    "Dropped",
    "FrontPoint",
    "Measured",
    "Search",
    "SearchProblem",
    "drop_slower",
    "exact_front",
    "search_algorithm",
    "search_front",
]
