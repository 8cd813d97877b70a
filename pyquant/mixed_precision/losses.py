"""What configurations lose: the first tables of a search, and the share of predictions that change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pyquant.core.registry import SCORERS
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs, TaskMetric
from pyquant.mixed_precision.loss.metrics import OutputMetric
from pyquant.mixed_precision.loss.scorers import Scoring
from pyquant.mixed_precision.options import SearchOptions
from pyquant.mixed_precision.work import Work


def _changed_rows(reference: Tensor, output: Tensor) -> Tensor:
    return (reference.argmax(-1) != output.argmax(-1)).to(torch.float64).unsqueeze(-1)


def _share(sums: Sequence[float], rows: int) -> float:
    return sums[0] / rows


# A prediction that stays the float model's is right or wrong as it was: accuracy moves by no more than this share.
DISAGREEMENT: Final = OutputMetric("disagreement", "share of predictions that change", False, _changed_rows, _share)


class Disagreement(LossOfOutputs):
    """The share of rows whose largest output is another one than the float model's."""

    def __init__(self, switchable: SwitchableModel, batches: Sequence[Any]) -> None:
        super().__init__(switchable, DISAGREEMENT, batches)


def first_tables(
    work: Work, switchable: SwitchableModel, loss: LossOfOutputs, task: TaskMetric | None, options: SearchOptions
) -> list[list[float]]:
    """[groups][formats]: what the model loses when one group alone has a format; 0 where it cannot have it."""
    scoring = Scoring(switchable, loss, task, seed=options.seed)
    scorer = SCORERS.find(options.sensitivity or options.metric)(scoring)
    if scorer.evaluator is None:
        pieces = scorer.work()
        keys = [" ".join(filter(None, (scorer.name, scorer.settings, piece.key))) for piece in pieces]
        return scorer.table(work.rows("sensitivities", keys, pieces, scorer.measure, scorer.width))
    cells = scoring.cells()
    start = switchable.uniform(0)
    key = "loss" if scorer.evaluator.unit == loss.unit else scorer.name
    asked = [single(start, g, f) for g, f in cells]
    table = scorer.empty()
    for (g, f), value in zip(cells, work.numbers("sensitivities", asked, scorer.evaluator, key=key), strict=True):
        table[g][f] = value
    return table


def single(start: Config, group: int, format_index: int) -> Config:
    """The float configuration with one group lowered."""
    return (*start[:group], format_index, *start[group + 1 :])
