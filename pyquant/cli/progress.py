"""Progress on long work: a bar on a terminal, plain lines elsewhere, always on stderr so that stdout stays data."""

from __future__ import annotations

import sys
import time
from typing import Any

_LINE_EVERY_S = 5.0
_FEW = 4  # steps, each of which has a line


class ProgressBar:
    """Counts steps of a known total.

    On a terminal with tqdm installed a bar; otherwise a line for each of a few steps; of more at the start, at the end,
    and at most every five seconds.

    Example:
        >>> with ProgressBar("layers", total=2) as progress:
        ...     progress.step("fc1")
    """

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self._bar: Any = _tqdm(label, total)
        self._last = -_LINE_EVERY_S

    def step(self, what: str = "") -> None:
        """One more step is starting or done; `what` names it."""
        self.done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(1)
        elif self.total <= _FEW or self.done == self.total or time.monotonic() - self._last >= _LINE_EVERY_S:
            self._last = time.monotonic()
            print(f"{self.label}: {self.done}/{self.total} {what}".rstrip(), file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm(label: str, total: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=label, file=sys.stderr, leave=False, dynamic_ncols=True)


class Stages:
    """Progress of work in named stages whose totals become known as they begin: call it with (what, done, total)."""

    def __init__(self, label: str) -> None:
        self._label, self._what = label, ""
        self._shown: ProgressBar | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            self._what, self._shown = what, ProgressBar(f"{self._label}: {what}", max(done, total))
        while self._shown is not None and self._shown.done < done - 1:  # a stage that goes on after another
            self._shown.done += 1
        if self._shown is not None and self._shown.done < done:
            self._shown.step()

    def close(self) -> None:
        """Ends the stage that is shown."""
        if self._shown is not None:
            self._shown.__exit__()
            self._shown, self._what = None, ""

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
