"""Which format for which group of layers: tables and callables in, configurations out. No tensor, no module.

The names below are looked up when they are asked for: importing pyquant imports this package, and must stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyquant.search.choice import choose
    from pyquant.search.front import Candidate, exact_front
    from pyquant.search.journal import Journal
    from pyquant.search.measurements import Measured
    from pyquant.search.problem import Config, Constraint, SearchProblem
    from pyquant.search.prune import Dropped, drop_slower
    from pyquant.search.registry import Search, algorithms, search_algorithm, search_front

_HOMES: Final = {
    "Candidate": "front", "Config": "problem", "Constraint": "problem", "Dropped": "prune", "Journal": "journal",
    "Measured": "measurements", "Search": "registry", "SearchProblem": "problem", "algorithms": "registry",
    "choose": "choice", "drop_slower": "prune", "exact_front": "front", "search_algorithm": "registry",
    "search_front": "registry",
}  # fmt: skip

__all__ = [
    "Candidate", "Config", "Constraint", "Dropped", "Journal", "Measured", "Search", "SearchProblem", "algorithms",
    "choose", "drop_slower", "exact_front", "search_algorithm", "search_front",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
