"""How sensitive groups of layers are: one file a method, a Scorer under @sensitivity_metric("name")."""

from pyquant.core.registry import import_modules
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Scoring, Work, sensitivity_metric

import_modules(__name__)

__all__ = ["Scorer", "Scoring", "Work", "sensitivity_metric"]
