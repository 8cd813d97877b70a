"""The journal of a search: every evaluation, on the disk before the search goes on, so that a killed one resumes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import TracebackType

from pyquant.errors import CheckpointError
from pyquant.io import journal
from pyquant.mixed_precision.solve.problem import Config, SearchProblem


class Journal:
    """An append-only file of evaluations of one problem (pyquant.io.journal), under a lock while it is open.

    path     the file; made if it is missing.
    problem  its fingerprint is in the first line.
    context  what else the losses depend on, {'model': digest, ...}.
    Raises CheckpointError for a journal of another problem or context, one that is damaged, or one in use.

    Example:
        >>> import tempfile
        >>> problem = SearchProblem(("a",), ("fp32", "int4"), loss=[[0, 1]], cost=[[8, 2]])
        >>> with tempfile.TemporaryDirectory() as d:
        ...     with Journal(f"{d}/journal", problem) as journal:
        ...         journal.append((1,), 0.5)
        ...     with Journal(f"{d}/journal", problem) as journal:
        ...         journal.losses
        {(1,): 0.5}
    """

    def __init__(
        self, path: str | os.PathLike[str], problem: SearchProblem, context: Mapping[str, str] | None = None
    ) -> None:
        facts = {"problem": problem.fingerprint(), **(context or {})}
        self._lines = journal.Journal(path, "evaluations of a search", facts)
        self.losses: dict[Config, float] = {}
        try:
            for key, value in self._lines.entries.items():
                self.losses[_config(problem, key)] = _loss(value)
        except ValueError:
            self.close()
            raise CheckpointError(f"{path}: {key!r}: no evaluation of this problem; allowed: a journal as it was "
                                  "written") from None  # fmt: skip

    def append(self, config: Config, loss: float) -> None:
        """Write one evaluation; when it returns, it is on the disk."""
        self._lines.add(" ".join(map(str, config)), float(loss).hex())  # JSON has no infinity
        self.losses[config] = float(loss)

    def close(self) -> None:
        """Gives the file free; a killed process gives it free too."""
        self._lines.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _config(problem: SearchProblem, key: str) -> Config:
    return problem.check([int(word) for word in key.split(" ")])


def _loss(value: object) -> float:
    loss = float.fromhex(value) if isinstance(value, str) else math.nan
    if math.isnan(loss):
        raise ValueError(value)
    return loss
