"""NSGA-II: the baseline runs, and says what it needs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from search_problems import decreasing

from pyquant.errors import UnsupportedError
from pyquant.mixed_precision.solve import search_front
from pyquant.report.records.pareto import hypervolume

PROBLEM = decreasing(6)


def test_without_pymoo_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "pymoo"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pymoo", None)
    with pytest.raises(UnsupportedError, match="pip install pymoo"):
        search_front(PROBLEM, PROBLEM.loss_of, 10, algorithm="nsga2")


def test_it_gets_better_and_the_model_gets_there_sooner() -> None:
    pytest.importorskip("pymoo", reason="pymoo is not installed")
    corner = (PROBLEM.cost_of((0,) * 6), 0.3 * PROBLEM.loss_of((2,) * 6))
    points = search_front(PROBLEM, PROBLEM.loss_of, 150, algorithm="nsga2", rng_seed=1)
    assert len(points) == 150
    early, late = (hypervolume([(p.cost, p.loss) for p in ps], corner) for ps in (points[:20], points))
    model = hypervolume([(p.cost, p.loss) for p in search_front(PROBLEM, PROBLEM.loss_of, 20)], corner)
    assert early < late <= model * 1.02
    assert early < model


def test_it_ends_where_nothing_new_is_left() -> None:
    pytest.importorskip("pymoo", reason="pymoo is not installed")
    problem, generations = decreasing(3), 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal generations
            generations += 1
            return function(*args, **kwargs)

        return call

    from pymoo.algorithms.moo.nsga2 import NSGA2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NSGA2, "next", counted(NSGA2.next))
        points = search_front(problem, problem.loss_of, 40, algorithm="nsga2")
    assert len(points) >= 26  # all but those that are known
    assert generations < 40


def test_seeds_differ() -> None:
    pytest.importorskip("pymoo", reason="pymoo is not installed")
    one, two = (search_front(PROBLEM, PROBLEM.loss_of, 30, algorithm="nsga2", rng_seed=s) for s in (1, 2))
    assert one != two
