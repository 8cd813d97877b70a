"""How sensitive groups of layers are: one file a method, each found by its name (registry.py)."""

from pyquant.analyse.scoring import error, fisher, hessian, noise, passes  # noqa: F401 (they register themselves)
from pyquant.analyse.scoring.registry import METRICS, Scorer, Scoring, Work, find_scorer, sensitivity_metric

__all__ = ["METRICS", "Scorer", "Scoring", "Work", "find_scorer", "sensitivity_metric"]
