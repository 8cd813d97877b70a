"""Finished pieces of a search: each done once, by one of the processes, and on the disk before the next begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from pyquant.mixed_precision.ledger import Ledger
from pyquant.mixed_precision.options import SearchOptions

T = TypeVar("T")


class Work:
    """Pieces by key, in stages. With torch.distributed every process calls alike, and all get the same.

    fingerprint  of everything that the pieces depend on.
    options      their journal and progress.
    counts       {stage: pieces}, those of an earlier run included.
    """

    def __init__(self, fingerprint: str, options: SearchOptions) -> None:
        self._ledger = Ledger(fingerprint, options.journal, lambda done, total, what: self._tell())
        self._progress = options.progress or (lambda what, done, total: None)
        self._stage, self._total = "", 0
        self.counts: dict[str, int] = {}

    def plain(self, stage: str, key: str, make: Callable[[], Any], total: int = 1) -> Any:
        """A piece that process 0 makes: data as JSON holds it."""
        self._begin(stage, total)
        return self._ledger.plain(f"{stage} {key}".rstrip(), make)

    def numbers(
        self, stage: str, items: Sequence[T], make: Callable[[T], float], total: int | None = None, key: str = ""
    ) -> list[float]:
        """A number for each item; the processes share the work. total: pieces that the stage will have at most.

        key  what is measured, so that stages that measure the same share their pieces; '': the stage.
        """
        keys = [f"{key or stage} {item}" for item in items]
        found = self.rows(stage, keys, items, lambda item: [make(item)], 1, total)
        return [row[0] for row in found]

    def rows(
        self,
        stage: str,
        keys: Sequence[str],
        items: Sequence[T],
        make: Callable[[T], Sequence[float]],
        width: int,
        total: int | None = None,
    ) -> list[list[float]]:
        """`width` numbers for each item; the processes share the work."""
        self._begin(stage, total or len(items))
        return self._ledger.rows(keys, make, items, width)

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger.close()

    def _begin(self, stage: str, total: int) -> None:
        self._stage, self._total = stage, total
        self.counts.setdefault(stage, 0)

    def _tell(self) -> None:
        self.counts[self._stage] += 1
        self._progress(self._stage, self.counts[self._stage], max(self._total, self.counts[self._stage]))
