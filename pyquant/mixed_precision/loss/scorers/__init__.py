"""How sensitive groups of layers are: one file a method, each found by its name (scorer.py)."""

from pyquant.mixed_precision.loss.scorers import error, fisher, hessian, noise, passes  # noqa: F401 (they register themselves)
from pyquant.mixed_precision.loss.scorers.scorer import METRICS, Scorer, Scoring, Work, find_scorer, sensitivity_metric

__all__ = ["METRICS", "Scorer", "Scoring", "Work", "find_scorer", "sensitivity_metric"]
