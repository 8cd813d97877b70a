"""Exhaustive: everything, once, in order."""

from __future__ import annotations

import pytest
from search_problems import every_config, random_problem

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.solve import search_front


def test_every_configuration_once() -> None:
    problem = random_problem(3, groups=4)
    points = search_front(problem, problem.loss_of, 81, algorithm="exhaustive", never_slower_margin=None)
    configs = every_config(problem)
    known = [(0,) * 4] if not problem.loss[:, 0].any() else []
    assert [p.config for p in points] == [c for c in configs if c not in known]


def test_a_budget_that_does_not_suffice_is_refused_before_anything_runs() -> None:
    problem = random_problem(3, groups=4, allow=1.0)
    with pytest.raises(ArgumentError, match="at least 81"):
        search_front(problem, lambda c: 1 / 0, 80, algorithm="exhaustive", never_slower_margin=None)
