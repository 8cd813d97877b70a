"""Metrics that run whole configurations: 'kl', 'sqnr', 'mse', 'cosine' of the outputs, 'eval' the user's own."""

from __future__ import annotations

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs
from pyquant.mixed_precision.loss.metrics import OUTPUT_METRICS
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Scoring, sensitivity_metric


class OutputPasses(Scorer):
    """The distance of a configuration's outputs from the float ones, in the output metric of its name; no labels."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring)
        loss = scoring.loss
        same = loss.metric.name == self.name
        self.evaluator = loss if same else LossOfOutputs(scoring.switchable, self.name, loss.batches)
        self.unit, self.predicts = self.evaluator.unit, self.evaluator.metric.additive


for _name in OUTPUT_METRICS:
    sensitivity_metric(_name)(type(_name, (OutputPasses,), {}))


@sensitivity_metric("eval")
class TaskPasses(Scorer):
    """The drop of the user's eval_fn, in its unit."""

    unit = "drop of eval_fn"

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring)
        if scoring.task is None:
            raise ArgumentError("eval_fn", "None, with metric 'eval'", "a function of the model that returns a number")
        self.evaluator = scoring.task
