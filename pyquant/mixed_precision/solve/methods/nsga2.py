"""NSGA-II of the library pymoo: the baseline that a method has to beat. Needs the extra `search`."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from pyquant.errors import UnsupportedError
from pyquant.mixed_precision.solve.problem import Config, Table
from pyquant.mixed_precision.solve.solver import Search, search_algorithm

POPULATION: Final = 20
GENERATIONS: Final = 200  # the budget ends it long before
IDLE: Final = 5  # generations without a configuration that is new, after which it ends


@search_algorithm("nsga2")
def nsga2(search: Search) -> None:
    """A population of 20, uniform configurations among the first. Nothing of the problem's loss table is used.

    Raises UnsupportedError without pymoo. Source: K. Deb et al., IEEE TEC 6 (2002); pymoo.
    """
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.core.problem import Problem
        from pymoo.operators.crossover.sbx import SBX
        from pymoo.operators.mutation.pm import PM
        from pymoo.operators.repair.rounding import RoundingRepair
        from pymoo.operators.sampling.rnd import IntegerRandomSampling
    except ImportError as error:
        raise UnsupportedError(f"algorithm 'nsga2' needs pymoo: pip install pymoo ({error})") from None
    problem = search.problem
    choices = [np.flatnonzero(row) for row in problem.mask]
    seen: set[Config] = set()

    def objectives(rows: Any) -> Table:
        configs: list[Config] = [tuple(int(c[round(i)]) for c, i in zip(choices, row, strict=True)) for row in rows]
        seen.update(configs)
        feasible = [c for c in configs if not problem.violations(c)]
        losses = dict(zip(feasible, search.measure(feasible), strict=True))
        return np.array([[problem.cost_of(c), losses.get(c, np.inf)] for c in configs])

    class Mixed(Problem):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(n_var=len(choices), n_obj=2, xl=0, xu=np.array([len(c) - 1 for c in choices]), vtype=int)

        def _evaluate(self, x: Any, out: dict[str, Any], *args: object, **kwargs: object) -> None:
            out["F"] = np.nan_to_num(objectives(x), posinf=1e300)

    search.measure(search.start)
    algorithm = NSGA2(
        pop_size=POPULATION,
        sampling=IntegerRandomSampling(),
        crossover=SBX(prob=0.9, eta=3.0, vtype=float, repair=RoundingRepair()),
        mutation=PM(prob=1.0, eta=3.0, vtype=float, repair=RoundingRepair()),
        eliminate_duplicates=True,
    )
    algorithm.setup(Mixed(), termination=("n_gen", GENERATIONS), seed=search.seed)
    idle = 0
    while algorithm.has_next() and idle < IDLE:
        before = len(seen)
        algorithm.next()
        idle = idle + 1 if len(seen) == before else 0
