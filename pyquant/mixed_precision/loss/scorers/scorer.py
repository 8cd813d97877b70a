"""Sensitivity metrics by name. A metric says what work it is, does a piece of it, and makes the table of the pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from pyquant.core.registry import SCORERS
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.ledger import Ledger
from pyquant.mixed_precision.loss.evaluate import Evaluator, LossOfOutputs, TaskMetric, check_batches

Table = list[list[float]]


@dataclass
class Scoring:
    """What a metric may use.

    switchable  the model in every format.
    loss        the label-free loss, with the batches to score on.
    task        the user's own metric, where there is one.
    loss_fn     loss_fn(model, batch) -> scalar tensor, the mean over the batch, for metrics with gradients; None: the
                label-free loss.
    repeats     draws of metrics that draw (of noise, labels, probes); None: the metric's own number.
    seed        of all draws.
    """

    switchable: SwitchableModel
    loss: LossOfOutputs
    task: TaskMetric | None = None
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None
    repeats: int | None = None
    seed: int = 0

    @property
    def batches(self) -> list[Any]:
        return check_batches(self.loss.batches)

    def cells(self) -> list[tuple[int, int]]:
        """(group, format) of every choice that is not the float one and that the layers can take."""
        return [(g, f) for g, row in enumerate(self.switchable.allowed) for f, ok in enumerate(row) if f and ok]

    def cells_of(self) -> dict[str, list[tuple[int, int]]]:
        """{layer: the cells of its group}."""
        return {layer: [c for c in self.cells() if c[0] == g] for layer, g in self.switchable.group_of.items()}

    def generator(self, device: torch.device, *what: object) -> torch.Generator:
        """A seed of its own for every draw, whichever process makes it and in whatever order."""
        text = " ".join(map(str, (self.seed, *what)))
        return torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))


@dataclass(frozen=True)
class Work:
    """A piece of work of one process.

    key       names it in a journal, together with the metric's name.
    at        what it is about, for the metric.
    forwards  batches that go through the model; backwards: backward passes.
    """

    key: str
    at: Any = field(compare=False, default=None)
    forwards: int = 0
    backwards: int = 0


class Scorer:
    """Base of the metrics: either of those that have an `evaluator` of whole configurations, which is all they need,
    or of those that look at layers in another way, by `work`, `measure` and `table`.

    evaluator measures a whole configuration; None for the metrics that do not.
    unit      of the sensitivities.
    predicts  the entries are losses that may be added: what lowering several groups will cost.
    repeats   draws where the user names no number; 0: nothing is drawn.
    needs_floats   it compares with the float outputs: one more pass of each batch.
    loss_name      of the loss behind it; '': none.
    backwards      passes for a batch, where a piece of work is one.
    """

    name: ClassVar[str] = ""
    evaluator: Evaluator | None = None
    unit: str = ""
    predicts: bool = True
    repeats: ClassVar[int] = 0
    needs_floats: ClassVar[bool] = False
    loss_name: str = ""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        self.draws = scoring.repeats or self.repeats

    @property
    def width(self) -> int:
        """Numbers that a piece of work gives."""
        return 1

    @property
    def settings(self) -> str:
        """What the rows depend on besides model and data; part of their keys in a journal."""
        drawn = f"draws={self.draws} seed={self.scoring.seed}" if self.repeats else ""
        return f"{drawn} loss={self.loss_name}" if self.loss_name else drawn

    @property
    def backwards(self) -> int:
        return 0

    def work(self) -> list[Work]:
        """All the work, in a fixed order; a piece for each batch, where a metric does not say anything else."""
        return [Work(f"batch {i}", i, 1, self.backwards) for i in range(len(self.scoring.batches))]

    def measure(self, work: Work) -> Sequence[float]:
        """`width` numbers: exactly the same ones whenever and wherever it runs."""
        raise NotImplementedError

    def table(self, rows: Sequence[Sequence[float]]) -> Table:
        """[groups][formats] of the rows in the order of `work`; 0 for the float format and where a group refuses."""
        raise NotImplementedError

    def filled(self, values: Iterable[float]) -> Table:
        """A table with a value for each of the cells, zeros elsewhere."""
        table = [[0.0] * len(self.scoring.switchable.formats) for _ in self.scoring.switchable.groups]
        for (g, f), value in zip(self.scoring.cells(), values, strict=True):
            table[g][f] = value
        return table

    def scored(self, ledger: Ledger, stage: str) -> Table:
        """The table of all the work, done through a ledger."""
        work = self.work()
        keys = [" ".join(filter(None, (self.name, self.settings, piece.key))) for piece in work]
        return self.table(ledger.rows(stage, keys, self.measure, work, self.width))


ScorerClass = TypeVar("ScorerClass", bound=type[Scorer])


def sensitivity_metric(name: str) -> Callable[[ScorerClass], ScorerClass]:
    """Registers a Scorer as sensitivity metric `name`.

    Raises ArgumentError for a name that is taken.
    """

    def named(cls: ScorerClass) -> ScorerClass:
        cls.name = name
        return cls

    return SCORERS.register(name, named)
