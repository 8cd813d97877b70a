"""Cases that not every run takes: a commit draws some of a grid, the nightly run takes all.

For grids whose cases go one way through the code: what has a way of its own is in every run. PYQUANT_SAMPLE names the
commit where there is no git, as for the sample of CUDA kernels (cmake/kernels.cmake).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import problems
import pytest

T = TypeVar("T")


def _commit() -> str:
    try:
        words = ["git", "rev-parse", "HEAD"]
        return subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


NIGHT = os.environ.get("PYQUANT_NIGHTLY", "") not in ("", "0")
COMMIT = os.environ.get("PYQUANT_SAMPLE") or _commit()


def drawn(cases: Sequence[T], number: int, *path: object, commit: str = COMMIT) -> list[T]:
    """`number` of the cases in their order, others for every commit and path."""
    draw, left = problems.Draw(problems.BASE_SEED, "sample", commit, *path), list(range(len(cases)))
    taken = {left.pop(draw.integer(0, len(left) - 1)) for _ in range(min(number, len(cases)))}
    return [case for i, case in enumerate(cases) if i in taken]


def some(cases: Sequence[T], number: int, *path: object) -> list[T]:
    """For loops within a test: `number` of them, nightly all."""
    return list(cases) if NIGHT else drawn(cases, number, *path)


def sampled(cases: Sequence[Any], number: int, *path: object, always: Sequence[Any] = ()) -> list[Any]:
    """For parametrize: all cases, those nightly that are neither in `always` nor among the `number` that are drawn."""
    unknown = [case for case in always if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    others = [case for case in cases if case not in always]
    taken = drawn(range(len(others)), number, *path)
    night = [case for i, case in enumerate(others) if i not in taken]
    return [pytest.param(c, id=str(c), marks=pytest.mark.nightly if c in night else ()) for c in cases]
