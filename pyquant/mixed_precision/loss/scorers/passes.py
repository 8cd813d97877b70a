"""Metrics that run whole configurations: 'kl', 'sqnr', 'mse', 'cosine' of the outputs, 'eval' the user's own."""

from __future__ import annotations

from typing import ClassVar

from pyquant.errors import ArgumentError
from pyquant.mixed_precision.loss.evaluate import Evaluator, LossOfOutputs
from pyquant.mixed_precision.loss.metrics import OUTPUT_METRICS
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Scoring, sensitivity_metric


class OutputPasses(Scorer):
    """The distance of a configuration's outputs from the float ones; no labels."""

    output: ClassVar[str]

    def __init__(self, scoring: Scoring) -> None:
        super().__init__(scoring)
        loss = scoring.loss
        same = loss.metric.name == self.output
        self._loss = loss if same else LossOfOutputs(scoring.switchable, self.output, loss.batches)
        self.unit, self.predicts = OUTPUT_METRICS[self.output].unit, OUTPUT_METRICS[self.output].additive

    @property
    def evaluator(self) -> Evaluator:
        return self._loss


@sensitivity_metric("kl")
class KlPasses(OutputPasses):
    """Kullback-Leibler divergence of the softmax of the outputs, nats a token."""

    output = "kl"


@sensitivity_metric("sqnr")
class SqnrPasses(OutputPasses):
    """Noise to signal of the outputs."""

    output = "sqnr"


@sensitivity_metric("mse")
class MsePasses(OutputPasses):
    """Mean squared error of the outputs."""

    output = "mse"


@sensitivity_metric("cosine")
class CosinePasses(OutputPasses):
    """1 - cosine of the outputs."""

    output = "cosine"


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
