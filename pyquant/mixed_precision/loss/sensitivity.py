"""sensitivity(): what each group of layers costs in each format, one at a time, left out one by one, or cumulated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.fingerprint import fingerprint
from pyquant.mixed_precision.choices.formats import Format, formats_of
from pyquant.mixed_precision.choices.groups import Group, Grouping, find_groups
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.ledger import Ledger
from pyquant.mixed_precision.loss.analysis import Analysis, Latency, check_latency, check_names
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs, TaskMetric
from pyquant.mixed_precision.loss.metrics import OUTPUT_METRICS
from pyquant.mixed_precision.loss.scorers import Scoring
from pyquant.nn.sites import Filter
from pyquant.report.records.sensitivity import SensitivityCost, SensitivityReport


def sensitivity(
    model: nn.Module | SwitchableModel,
    data: Iterable[Any] | None = None,
    formats: Sequence[str] = ("float", "int8", "int4"),
    metric: str = "kl",
    mode: str = "one_at_a_time",
    *,
    eval_fn: Callable[[nn.Module], Any] | None = None,
    higher_is_better: bool = True,
    batches: Iterable[Any] | None = None,
    num_batches: int | None = None,
    batch_to_inputs: Callable[[Any], Any] | None = None,
    to_output: Callable[[Any], Tensor] | None = None,
    grouping: Grouping = "auto",
    filter_fn: Filter | None = None,
    latency: Latency | None = None,
    loss: str = "kl",
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    repeats: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> SensitivityReport:
    """Which layers suffer by which format, and which to keep in floating point.

    model, data, formats, num_batches, batch_to_inputs, to_output, grouping, filter_fn   as in SwitchableModel, or a
                ready SwitchableModel, which then decides about all of them.
    metric      'kl', 'sqnr', 'mse', 'cosine': distance of the outputs from the float ones. 'eval': drop of eval_fn.
                'noise': `loss` under noise as large as the code steps. 'fisher': from one forward and one backward
                pass. 'hessian': trace of the weights' Hessian times their squared change. 'error': rounding error of
                weights and inputs. See docs/sensitivity.md 3.
    mode        'one_at_a_time': each group alone lowered. 'leave_one_out': all lowered but one; needs a metric of
                outputs or 'eval'. 'cumulative': one after another is lowered, the least sensitive first, and `loss`
                (or the metric itself, where it can) is measured after each.
    eval_fn     eval_fn(model) -> number; with a metric other than 'eval' it is measured as well.
    batches     data to score on; None: the batches of `data` that calibrated. Held-out data is better.
    latency     a table with predict(configuration) -> microseconds (LatencyTable), reported with the losses.
    loss        'kl', 'mse', 'sqnr' or 'cosine': the label-free loss behind 'noise', 'fisher' (not 'cosine'), 'hessian'
                (not 'cosine') and the steps of 'cumulative'. 'kl' is for models whose last output dimension are logits.
    loss_fn     loss_fn(model, batch) -> scalar, for 'hessian' instead of `loss`.
    repeats, seed   draws of noise, labels and probes; None: the metric's own number.
    progress    progress(done, total, what), after every evaluation.
    journal     file that keeps every evaluation; the same call goes on after what it holds. It belongs to one model,
                data and formats, not to one metric or mode.
    ->          SensitivityReport. With torch.distributed initialised all processes call this with equal arguments,
                share the work, and get the same report, bit for bit that of one process.
    Raises ArgumentError, CalibrationError, NonFiniteError; CheckpointError for a journal of something else;
    UnsupportedError for gradients through a model that has none. The cost is known before: cost_of.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        >>> report = sensitivity(model, [torch.randn(16, 8)], num_batches=1)
        >>> [len(row) for row in report.loss], report.cost.forward_passes, len(report.skip_list(0.0))
        ([3, 3], 5, 2)
    """
    arguments.function("progress", progress, "(done, total, what)")
    arguments.function("loss_fn", loss_fn, "(model, batch) -> loss")
    arguments.one_of("loss", loss, OUTPUT_METRICS)
    if isinstance(model, SwitchableModel):
        if data is not None:
            raise ArgumentError(
                "data", "given, with a SwitchableModel", "None: it has its batches; others to score on are `batches`"
            )
        switchable = model
    else:
        check_names(metric, mode)
        switchable = SwitchableModel(
            model,
            formats,
            data,
            num_batches=num_batches,
            batch_to_inputs=batch_to_inputs,
            to_output=to_output,
            grouping=grouping,
            filter_fn=filter_fn,
        )
    task = None if eval_fn is None else TaskMetric(switchable, eval_fn, higher_is_better)
    own = "those that calibrated" if batches is None else "given apart"
    scoring = Scoring(switchable, LossOfOutputs(switchable, loss, batches), task, loss_fn, _number(repeats), seed)
    analysis = Analysis(scoring, metric, mode)
    calibration = 0 if isinstance(model, SwitchableModel) else _calibration(switchable.formats, len(switchable.batches))
    cost = analysis.cost(calibration)
    check_latency(latency, switchable)
    facts = fingerprint(switchable, scoring.loss.batches, eval_fn and _name_of(eval_fn))

    def on_piece(stage: str, key: str, done: int, total: int) -> None:
        if progress is not None:
            progress(done, cost.evaluations, key)

    with Ledger(facts, journal, on_piece) as ledger:
        return analysis.run(ledger, cost, latency, f"{len(scoring.loss.batches)} batches, {own}")


def cost_of(
    model: nn.Module,
    formats: Sequence[str] = ("float", "int8", "int4"),
    metric: str = "kl",
    mode: str = "one_at_a_time",
    *,
    with_eval: bool = False,
    batches: int | None = None,
    num_batches: int = 16,
    grouping: Grouping = "auto",
    filter_fn: Filter | None = None,
    repeats: int | None = None,
    loss: str = "kl",
) -> SensitivityCost:
    """What sensitivity() with these arguments will take, before anything runs; less where groups refuse a format.

    with_eval  an eval_fn will be given (with metric 'eval' it always is).
    batches    how many batches are scored on; None: num_batches, those that calibrate.

    Example:
        >>> cost_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), num_batches=4).line()
        '4 evaluations: 20 forward passes, 8 forward passes before, to calibrate'
    """
    check_names(metric, mode)
    checked = formats_of(formats)
    groups = find_groups(model, grouping, filter_fn)
    outline = _Outline(groups, checked, tuple((True,) * len(checked) for _ in groups))
    stand_in: Any = outline
    losses = LossOfOutputs(stand_in, loss, [None] * (num_batches if batches is None else batches))
    task = TaskMetric(stand_in, type) if with_eval or metric == "eval" else None
    analysis = Analysis(Scoring(stand_in, losses, task, None, _number(repeats)), metric, mode)
    return analysis.cost(_calibration(checked, num_batches))


@dataclass(frozen=True)
class _Outline:
    """What is known of a SwitchableModel before it is made."""

    groups: tuple[Group, ...]
    formats: tuple[Format, ...]
    allowed: tuple[tuple[bool, ...], ...]


def _calibration(formats: Sequence[Format], batches: int) -> int:
    return batches * sum(f.needs_data for f in formats)


def _number(repeats: int | None) -> int | None:
    return None if repeats is None else arguments.whole("repeats", repeats, 1)


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
