"""The rounds of the founding experiment, on the disk one by one; a killed run goes on behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyquant.errors import ArgumentError
from pyquant.io.journal import Journal


class Rounds:
    """Seconds of every candidate in every finished round.

    path   a journal (pyquant.io.journal), or None: kept in memory only.
    key    what must be equal for rounds to go together: sizes, device, versions, the candidates' names ...
    Raises CheckpointError where the file is of another setting (naming what differs), damaged, or no journal.
    """

    def __init__(self, path: Path | None, key: dict[str, Any], candidates: int) -> None:
        self.candidates = candidates
        facts = {name: str(value) for name, value in {**key, "candidates": candidates}.items()}
        self._journal = None if path is None else Journal(path, "rounds of the founding experiment", facts)
        held = {} if self._journal is None else self._journal.entries
        self.done: list[list[float]] = [[float(value) for value in row] for row in held.values()]

    def add(self, seconds: list[float]) -> None:
        """A finished round; it is on the disk when this returns."""
        if len(seconds) != self.candidates:
            raise ArgumentError("seconds", f"{len(seconds)} numbers", f"{self.candidates}, one a candidate")
        kept = [float(f"{value:.5g}") for value in seconds]  # what a later run will read, so that both say the same
        if self._journal is not None:
            self._journal.add(str(len(self.done)), kept)
        self.done.append(kept)

    def close(self) -> None:
        """Gives the file free."""
        if self._journal is not None:
            self._journal.close()
