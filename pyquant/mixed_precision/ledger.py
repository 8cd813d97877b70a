"""Pieces of work that are spread over processes, kept in a journal and taken from it, with their progress."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pyquant.errors import CheckpointError
from pyquant.io.journal import Journal
from pyquant.mixed_precision.spread import by_first, check_equal, plain_by_first, spread_rows

T = TypeVar("T")
Row = Sequence[float]
OnPiece = Callable[[str, str, int, int], None]
KIND = "evaluations"


class Ledger:
    """Pieces of work by key, in stages: each done once, by one process, and on the disk before the next begins.

    fingerprint  what the pieces depend on; must be the same in every process.
    journal      file that process 0 keeps; None: nothing survives the process.
    progress     progress(stage, key, done, total), called when a piece is there. done, total: of the stage.
    Attributes: counts ({stage: pieces}, those of an earlier run included).
    Raises CheckpointError for a journal that is damaged or of something else; ArgumentError where processes differ.
    """

    def __init__(
        self, fingerprint: str, journal: str | os.PathLike[str] | None = None, progress: OnPiece | None = None
    ) -> None:
        check_equal("model", fingerprint)
        self._journal = by_first(lambda: None if journal is None else Journal(journal, KIND, fingerprint))
        self._progress = progress
        self._rows: dict[str, list[float]] = {}
        self.counts: dict[str, int] = {}

    def numbers(
        self, stage: str, items: Sequence[T], fn: Callable[[T], float], total: int = 0, key: str = ""
    ) -> list[float]:
        """A number for each item.

        key    what is measured, so that stages that measure the same share their pieces; '': the stage.
        total  pieces that the stage will have at most; 0: as many as items.
        """
        keys = [f"{key or stage} {item}" for item in items]
        return [row[0] for row in self.rows(stage, keys, lambda item: [fn(item)], items, 1, total)]

    def rows(
        self, stage: str, keys: Sequence[str], fn: Callable[[T], Row], items: Sequence[T], width: int, total: int = 0
    ) -> list[list[float]]:
        """fn(item) -> `width` numbers for every item, or what is known of it by its key; in order."""
        total = total or len(items)
        self.counts.setdefault(stage, 0)
        asked = list(dict.fromkeys(key for key in keys if key not in self._rows))
        at = dict(zip(keys, items, strict=True))

        def keep(i: int, row: list[float]) -> None:
            if self._journal is not None:
                self._journal.add(asked[i], [x if math.isfinite(x) else repr(x) for x in row])
            self._report(stage, asked[i], total)

        held = plain_by_first(lambda: [self._known(key, width) for key in asked])
        for key in (key for key, row in zip(asked, held, strict=True) if row is not None):
            self._report(stage, key, total)
        rows = spread_rows([at[key] for key in asked], fn, width, known=held, on_row=keep)
        self._rows.update(zip(asked, rows, strict=True))
        return [self._rows[key] for key in keys]

    def plain(self, stage: str, key: str, make: Callable[[], Any], total: int = 1, pieces: int = 1) -> Any:
        """What process 0 makes, or what the journal holds of it: data as JSON has it, the same in every process.

        pieces  how many of the `total` are made at once.
        """
        key = f"{stage} {key}".rstrip()
        self.counts.setdefault(stage, 0)

        def recorded() -> Any:
            if self._journal is None:
                return make()
            if key not in self._journal.entries:
                self._journal.add(key, make())
            return self._journal.entries[key]

        value = plain_by_first(recorded)
        self._report(stage, key, total, pieces)
        return value

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._journal.close()

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

    def _report(self, stage: str, key: str, total: int, pieces: int = 1) -> None:
        self.counts[stage] += pieces
        if self._progress is not None:
            self._progress(stage, key, self.counts[stage], max(total, self.counts[stage]))
