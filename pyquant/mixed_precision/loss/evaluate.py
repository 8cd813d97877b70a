"""What a configuration loses: against the float model's own outputs (no labels), or by the user's task metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.choices.watch import hooked
from pyquant.mixed_precision.loss.metrics import Accumulator, OutputMetric, find_metric, mean


class LossOfOutputs:
    """The distance of a configuration's outputs from those of the float model; needs no labels.

    switchable  the model in every format.
    metric      'kl' (nats a token; for models whose last dimension are logits), 'sqnr' (noise to signal), 'mse',
                'cosine' (1 - cosine): small is better, see pyquant.mixed_precision.loss.metrics.
    batches     data to score on. None: the batches that calibrated. Held-out data is better: on inputs that a model
                has memorised, losses come out too small and in the wrong order (docs/sensitivity.md 5).
    Raises ArgumentError for no batches; NonFiniteError naming batch and configuration.

    The float outputs are computed once, at the first call, and kept.
    Attributes: metric (OutputMetric), batches, forward_passes (batches that ran so far).

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        >>> data = [torch.randn(4, 8) for _ in range(2)]
        >>> loss = LossOfOutputs(SwitchableModel(model, ("float", "W8A8Dynamic"), data, num_batches=2), "kl")
        >>> loss((0, 0)), loss((1, 1)) > 0, loss.forward_passes
        (0.0, True, 4)
    """

    def __init__(
        self, switchable: SwitchableModel, metric: str | OutputMetric = "kl", batches: Iterable[Any] | None = None
    ) -> None:
        self.switchable = switchable
        self.metric = find_metric(metric) if isinstance(metric, str) else metric
        self.batches = list(switchable.batches if batches is None else arguments.iterable("batches", batches))
        if batches is not None:
            check_batches(self.batches)
        self.forward_passes = 0
        self._floats: list[Tensor] | None = None

    @property
    def unit(self) -> str:
        return self.metric.unit

    def floats(self) -> list[Tensor]:
        """The float model's output for every batch."""
        if self._floats is None:
            check_batches(self.batches)
            self._floats = self.switchable.outputs(self.switchable.uniform(0), self.batches)
            self.forward_passes += len(self.batches)
            for index, outputs in enumerate(self._floats):
                if not bool(outputs.isfinite().all()):
                    self._floats = None
                    raise NonFiniteError("model", f"NaN or infinity in its outputs of batch {index}", "finite outputs")
        return self._floats

    def __call__(self, config: Config) -> float:
        """The loss of a configuration; exactly 0 for the float one, without a pass."""
        floats = self.floats()
        if not any(self.switchable.check(config)):
            return 0.0
        distance = Accumulator(self.metric)
        with self.switchable.using(config), torch.inference_mode():
            for reference, batch in zip(floats, self.batches, strict=True):
                self.forward_passes += 1
                try:
                    distance.add(reference, self.switchable.call(batch))
                except NonFiniteError as error:
                    got = f"{error.got} ({self.switchable.text(config)})"
                    raise NonFiniteError(error.argument, got, error.allowed) from error
        return distance.value()


class TaskMetric:
    """What a configuration loses of the user's own metric.

    switchable        the model in every format.
    eval_fn           eval_fn(model) -> number: accuracy, F1, perplexity ...; it sees the model in the configuration,
                      in evaluation mode, without gradients, and must give the same number every time.
    higher_is_better  True for accuracies, False for errors and perplexities.
    Raises ArgumentError for what returns no number, NonFiniteError for NaN and infinity.

    Attributes: forward_passes (calls of the model inside of eval_fn so far).
    """

    unit = "drop of eval_fn"

    def __init__(
        self, switchable: SwitchableModel, eval_fn: Callable[[nn.Module], Any], higher_is_better: bool = True
    ) -> None:
        arguments.function("eval_fn", eval_fn, "of the model that returns a number", optional=False)
        arguments.flag("higher_is_better", higher_is_better)
        self.switchable, self.eval_fn, self.higher_is_better = switchable, eval_fn, higher_is_better
        self.forward_passes = 0

    @cached_property
    def baseline(self) -> float:
        """The metric of the float model, measured once; or set to what an earlier run measured."""
        return self._measure(self.switchable.uniform(0))

    def value(self, config: Config) -> float:
        """The metric of a configuration, as eval_fn gives it."""
        return self._measure(config) if any(self.switchable.check(config)) else self.baseline

    def __call__(self, config: Config) -> float:
        """The loss: how much worse than the float model, in the metric's unit; noise may make it negative."""
        return self.loss_of(self.value(config))

    def loss_of(self, value: float) -> float:
        """The loss that goes with a value of the metric."""
        return self.baseline - value if self.higher_is_better else value - self.baseline

    def _measure(self, config: Config) -> float:
        with self.switchable.using(config) as model, torch.no_grad(), hooked([(model, self._count)], before=True):
            result = self.eval_fn(model)
        if isinstance(result, Tensor) and result.numel() == 1:
            result = result.item()
        try:
            value = float(result)
        except (TypeError, ValueError):
            got = f"a function that returned a {type(result).__name__}"
            raise ArgumentError("eval_fn", got, "one number") from None
        if not math.isfinite(value):
            raise NonFiniteError("eval_fn", f"{value} ({self.switchable.text(config)})", "a finite number")
        return value

    def _count(self, *_: Any) -> None:
        self.forward_passes += 1


Evaluator = LossOfOutputs | TaskMetric


def check_batches(batches: list[Any]) -> list[Any]:
    """The batches to score on. Raises ArgumentError where there are none."""
    if not batches:
        raise ArgumentError("batches", "none", "at least one batch, given here or as data of the model")
    return batches


def _changed_rows(reference: Tensor, output: Tensor) -> Tensor:
    return (reference.argmax(-1) != output.argmax(-1)).to(torch.float64).unsqueeze(-1)


# A prediction that stays the float model's is right or wrong as it was: accuracy moves by no more than this share.
DISAGREEMENT: Final = OutputMetric("disagreement", "share of predictions that change", False, _changed_rows, mean)
