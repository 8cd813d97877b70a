"""Metrics that run whole configurations: 'kl', 'sqnr', 'mse', 'cosine' of the outputs, 'eval' the user's own."""

from __future__ import annotations

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.loss.evaluate import Evaluator, LossOfOutputs
from pyquant.mixed_precision.loss.metrics import OUTPUT_METRICS
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Scoring, sensitivity_metric


class OutputPasses(Scorer):
    """The distance of a configuration's outputs from the float ones, in the output metric of its name; no labels."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring)
        loss = scoring.loss
        same = loss.metric.name == self.name
        self._loss = loss if same else LossOfOutputs(scoring.switchable, self.name, loss.batches)
        self.unit, self.predicts = OUTPUT_METRICS[self.name].unit, OUTPUT_METRICS[self.name].additive

    @property
    def evaluator(self) -> Evaluator:
        return self._loss


@sensitivity_metric("kl")
class KlPasses(OutputPasses):
    """Kullback-Leibler divergence of the softmax of the outputs, nats a token."""


@sensitivity_metric("sqnr")
class SqnrPasses(OutputPasses):
    """Noise to signal of the outputs."""


@sensitivity_metric("mse")
class MsePasses(OutputPasses):
    """Mean squared error of the outputs."""


@sensitivity_metric("cosine")
class CosinePasses(OutputPasses):
    """1 - cosine of the outputs."""


@sensitivity_metric("eval")
class TaskPasses(Scorer):
    """The drop of the user's eval_fn, in its unit."""

    unit = "drop of eval_fn"

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring)
        if scoring.task is None:
            raise ArgumentError("eval_fn", "None, with metric 'eval'", "a function of the model that returns a number")
        self._task = scoring.task

    @property
    def evaluator(self) -> Evaluator:
        return self._task
