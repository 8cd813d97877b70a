"""Evaluations that are spread over processes, kept in a journal and taken from it, with their progress told."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pyquant.errors import CheckpointError
from pyquant.io.journal import Journal
from pyquant.mixed_precision.spread import by_first, check_equal, plain_by_first, spread_rows

T = TypeVar("T")
OnProgress = Callable[[int, int, str], None]
KIND = "evaluations"


class Ledger:
    """Rows of numbers by key, each worked out once.

    fingerprint  what the rows depend on; must be the same in every process.
    journal      file that process 0 keeps; None: nothing survives the process.
    progress     progress(done, total, what), called when a row is there; in process 0 also for rows of the journal.
    total        how many rows there will be.
    Raises CheckpointError for a journal that is damaged or of something else; ArgumentError where processes differ.

    Example:
        >>> with Ledger("f", total=2) as ledger:
        ...     ledger.rows(["1", "2"], lambda i: [i / 2], [1, 2], 1)
        [[0.5], [1.0]]
    """

    def __init__(
        self,
        fingerprint: str,
        journal: str | os.PathLike[str] | None = None,
        progress: OnProgress | None = None,
        total: int = 0,
    ) -> None:
        check_equal("model", fingerprint)
        self._journal = by_first(lambda: None if journal is None else Journal(journal, KIND, fingerprint))
        self._progress, self._total, self._done = progress, total, 0
        self._rows: dict[str, list[float]] = {}

    def rows(
        self, keys: Sequence[str], fn: Callable[[T], Sequence[float]], items: Sequence[T], width: int
    ) -> list[list[float]]:
        """fn(item) -> `width` numbers for every item, or what is known of it by its key; in order."""
        asked = list(dict.fromkeys(key for key in keys if key not in self._rows))
        at = dict(zip(keys, items, strict=True))

        def keep(i: int, row: list[float]) -> None:
            if self._journal is not None:
                self._journal.add(asked[i], [x if math.isfinite(x) else repr(x) for x in row])
            self._tell(asked[i])

        known = by_first(
            lambda: {i: row for i, key in enumerate(asked) if (row := self._known(key, width)) is not None}
        )
        for i in known or ():
            self._tell(asked[i])
        found = spread_rows([at[key] for key in asked], fn, width, known=known, on_row=keep)
        self._rows.update(zip(asked, found, strict=True))
        return [self._rows[key] for key in keys]

    def plain(self, key: str, make: Callable[[], Any]) -> Any:
        """What process 0 makes, or what the journal holds of it: data as JSON has it, the same in every process."""

        def found() -> Any:
            if self._journal is None:
                return make()
            if key not in self._journal.entries:
                self._journal.add(key, make())
            return self._journal.entries[key]

        value = plain_by_first(found)
        self._tell(key)
        return value

    def close(self) -> None:
        """Gives the journal back."""
        if self._journal is not None:
            self._journal.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, key: str, width: int) -> list[float] | None:
        if self._journal is None or key not in self._journal.entries:
            return None
        value = self._journal.entries[key]
        try:
            row = [float(x) for x in value] if isinstance(value, list) else []
        except (TypeError, ValueError):
            row = []
        if len(row) != width:
            raise CheckpointError(f"{self._journal.path}: {key}: {value!r}"[:200] + f"; allowed: {width} numbers")
        return row

    def _tell(self, what: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total, what)
